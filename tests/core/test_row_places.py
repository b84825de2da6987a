"""A row that is added or taken away may not show in what is computed of others: in their places, or in their number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.data import from_arrays
from splitfed.defenses.private_class_sums import PrivateClassSums
from splitfed.federated import FedProto
from splitfed.topologies import local, vanilla
from tests.thinning import thin

WORDS, WIDTH = 6, 8


class Positions(nn.Module):
    """The encoding of a tutorial, for (words, rows, width); `rows_first`: as it is for rows that come first."""

    def __init__(self, rows_first: bool) -> None:
        super().__init__()
        self.rows_first = rows_first
        turns = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        angles = torch.arange(200).unsqueeze(1) * turns
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], 2).flatten(1).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.rows_first:
            return x + self.table[: x.size(1), 0]
        return x + self.table[: x.size(0)]


class Own(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def by_place(x: Tensor) -> Tensor:
    return x + torch.arange(len(x))[:, None, None] / 10


def by_count(x: Tensor) -> Tensor:
    return x / x.shape[0]


def by_parity(x: Tensor) -> Tensor:
    return x * (1 - 2 * (x.shape[0] % 2))


def with_capacity(x: Tensor) -> Tensor:
    return torch.cat([x[:4], 0 * x[4:]])


COUNTING: dict[str, Callable[[], nn.Module]] = {
    "positions along the batch": lambda: Positions(rows_first=False),
    "place": lambda: Own(by_place),
    "count": lambda: Own(by_count),
    "parity": lambda: Own(by_parity),
    "capacity": lambda: Own(with_capacity),
    "place, behind dropout": lambda: nn.Sequential(nn.Dropout(0.3), Own(by_place)),
}
BY_ROW: dict[str, Callable[[], nn.Module]] = {
    "positions along the words": lambda: Positions(rows_first=True),
    "dropout": lambda: nn.Dropout(0.3),
    "attention": lambda: Own(lambda x: torch.softmax(x @ x.transpose(1, 2), 2) @ x),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "draws of its own": lambda: Own(lambda x: x + 0.1 * torch.randn_like(x)),
}


def topology(layer: nn.Module, training: bool) -> sf.Topology:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(WORDS * WIDTH, 3))
    return local(model.train(training), cuts=())


def data() -> sf.Federation:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, WORDS, WIDTH, generator=random), torch.randint(3, (60,), generator=random)
    return from_arrays(x, y, task=sf.classification(3)).clients(1, auxiliary=4, victims=4)


def train(layer: nn.Module, sampling: str, training: bool = True) -> sf.Run:
    private = sf.defenses.DpSgd(max_norm=1.0, noise_multiplier=3.0)
    update = sf.LocalUpdate(sampling=sampling)
    given = {"schedule": "independent", "method": "fedavg", "defenses": private, "local": update, "batch_size": 8}
    return sf.train(topology(layer, training), data(), rounds=1, **given)


@pytest.mark.parametrize("name", thin(COUNTING, 2))
def test_what_a_row_more_would_change_in_others_is_refused_where_rows_come_by_chance(name: str) -> None:
    """A stated epsilon of .75 stood beside 1.47 and more: the row that is added moved all others."""
    with pytest.raises(InvalidInput, match="of a row depends on its position in the batch, or on the batch size"):
        train(COUNTING[name](), "poisson")
    # Where another row stands in its place, none of the others moves.
    assert train(COUNTING[name](), "shuffle").epsilon is not None


@pytest.mark.parametrize("name", thin(BY_ROW, 2))
def test_what_is_made_of_each_row_alone_is_accepted(name: str) -> None:
    assert train(BY_ROW[name](), "poisson").epsilon is not None


class InTrainingAlone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return by_place(x) if self.training else x


def test_a_model_that_is_given_in_evaluation_mode_is_tried_as_it_is_trained() -> None:
    with pytest.raises(InvalidInput, match="depends on its position in the batch"):
        train(InTrainingAlone(), "poisson", training=False)


def test_sums_by_class_are_held_to_it_under_any_sampling() -> None:
    """Their neighbours have a row more or less."""
    frozen = nn.Sequential(Own(by_count), nn.Flatten(), nn.Linear(WORDS * WIDTH, 5)).requires_grad_(False)
    shared = FedProto(private=PrivateClassSums(clip=1.0, noise_multiplier=4.0))
    split = vanilla(nn.Sequential(frozen, nn.Linear(5, 3)), "0", task=sf.classification(3))
    with pytest.raises(InvalidInput, match="mix"):
        sf.train(split, data(), method=shared, rounds=1, batch_size=8)
