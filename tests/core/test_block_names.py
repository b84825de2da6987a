"""Places by block: which names are offered, and that the listing is that of all places, the others left out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.block_names import block_names
from splitfed.core.cut_places import cut_places
from splitfed.core.errors import InvalidInput
from splitfed.models.lenet import lenet


class Block(nn.Module):
    """A block with a list of its own, of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(torch.relu(expert(x)) for expert in self.experts)


class Encoder(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = block(x)
        return x


class Model(nn.Module):
    """Named as models of language are: embeddings, an encoder with a list of layers, a pooler, a head outside."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {
                "embeddings": nn.Sequential(nn.Linear(4, 6), nn.ReLU()),
                "encoder": Encoder(blocks),
                "pooler": nn.Linear(6, 6),
            }
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body["pooler"](self.body["encoder"](self.body["embeddings"](x))))


def stages(*blocks: int) -> nn.Sequential:
    """Return a stem, a stage for each number of blocks, and a head, as of a convolutional network."""
    layers = (nn.Sequential(*(Block() for _ in range(count))) for count in blocks)
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 2))


def shared() -> nn.Module:
    """Return a model whose encoder has the embeddings of the model itself."""
    model = nn.ModuleDict({"words": nn.Embedding(4, 6), "encoder": Encoder(2)})
    model["encoder"].words = model["words"]
    return model


NAMES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "language": (
        Model,
        ["body.embeddings", *(f"body.encoder.layer.{i}" for i in range(3)), "body.pooler", "head"],
    ),
    "two lists": (lambda: stages(2, 3), ["0", "1.0", "1.1", "2.0", "2.1", "2.2", "3"]),
    "one block beside a list": (lambda: stages(1, 2), ["0", "1.0", "2.0", "2.1", "3"]),
    "shared": (shared, ["words", "encoder.layer.0", "encoder.layer.1"]),
    "the model itself": (lambda: nn.Sequential(Block(), Block()), ["0", "1"]),
    "lists of lists": (
        lambda: nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2))),
        ["0", "1"],
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_of_blocks_and_of_what_stands_beside_them(case: str) -> None:
    make, names = NAMES[case]
    assert list(block_names(make())) == names


@pytest.mark.parametrize("make", [lambda: lenet((1, 8, 8), 10), lambda: nn.Linear(2, 2), lambda: Model(blocks=1)])
def test_a_model_without_blocks_is_one_line_that_says_what_to_do(make: Callable[[], nn.Module]) -> None:
    model = make()
    told = f"{type(model).__name__} has no list of repeated blocks (an nn.ModuleList or nn.Sequential of 2 or more"
    with pytest.raises(InvalidInput, match=re.escape(told)) as raised:
        cut_places(model, torch.rand(8, 1, 8, 8), blocks=True)
    assert str(raised.value).endswith("to a depth instead, such as depth=2 (--depth 2)")
    assert "\n" not in str(raised.value)


def test_depth_and_blocks_exclude_each_other() -> None:
    with pytest.raises(InvalidInput, match="depth=1 and blocks exclude each other"):
        cut_places(Model(), torch.rand(8, 4), 1, blocks=True)


def test_places_by_block_are_those_of_the_whole_listing() -> None:
    torch.manual_seed(0)
    model, rows = Model(blocks=2), torch.rand(8, 4)
    known = {name: place for place in cut_places(model, rows) for name in (place.name, *place.aliases)}
    found = cut_places(model, rows, blocks=True)
    assert [place.name for place in found] == list(block_names(model))
    assert [place.possible for place in found] == [True] * 4 + [False]
    for place in found:
        other = known[place.name]
        assert [place.refusal, place.multiply_adds, place.parameters, place.bytes] == [
            *(other.refusal, other.multiply_adds, other.parameters, other.bytes)
        ]
