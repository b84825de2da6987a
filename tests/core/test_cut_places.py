"""Where a model can be cut: bytes as they are counted in training, reasons as `cut` gives them, in running order."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.cut_places import CutPlace, CutValue, cut_places, deepest
from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.costs.measure import segment_flops
from splitfed.models.lenet import lenet
from splitfed.models.residual import Block
from splitfed.topologies.vanilla import vanilla
from tests.core.test_replay import Gated, encoder, words
from tests.examples import engine_of, images

FLOAT = torch.float32


class Repeated(nn.Module):
    """`core` and `act` run twice, `spare` never, `two` holds the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.core, self.act = nn.Linear(4, 6), nn.Linear(6, 6), nn.ReLU()
        self.spare, self.two = nn.Linear(2, 2), nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.core(self.act(self.core(self.stem(x))))))


class Tied(nn.Module):
    """`back` has the weight of `mid`."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.mid, self.back, self.end = (nn.Linear(6, 6) for _ in range(4))
        self.back.weight = self.mid.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.back(torch.relu(self.mid(self.start(x)))))


class Stopped(nn.Module):
    """What `stem` returns is read behind `body` too, without a gradient; the raw rows are read again by `head`."""

    def __init__(self, raw: bool = False) -> None:
        super().__init__()
        self.stem, self.body, self.head, self.raw = nn.Linear(4, 3), nn.Linear(4, 5), nn.Linear(9, 2), raw

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        body = self.body(torch.cat([stem, stem[:, :1]], 1))
        return self.head(torch.cat([body, stem.detach(), x[:, :1] if self.raw else body[:, :1]], 1))


def residual() -> nn.Sequential:
    """Return the stem, one block and the head of a ResNet, with channels for a test."""
    layers = {"conv": nn.Conv2d(1, 2, 3, padding=1), "block": Block(2, 2)}
    return nn.Sequential(OrderedDict(**layers, flatten=nn.Flatten(), fc=nn.Linear(2 * 64, 10)))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def by_name(model: nn.Module, example: Tensor | Mapping[str, Tensor], depth: int | None = None) -> dict[str, CutPlace]:
    return {place.name: place for place in cut_places(model, example, depth)}


@cache
def residual_places() -> dict[str, CutPlace]:
    return by_name(seeded(residual), images(8)[0])


def test_the_places_of_lenet_by_hand() -> None:
    """8x8 pixels: 6 maps of 8x8 by 25 products a value, 16 of 4x4 by 150, then 64 x 120, 120 x 84 and 84 x 10."""
    places = by_name(lenet((1, 8, 8), 10), images(8)[0])
    assert list(places) == [name for name, _ in lenet((1, 8, 8), 10).named_modules() if name]
    products = [6 * 64 * 25, 16 * 16 * 150, 64 * 120, 120 * 84, 84 * 10]
    weights = [6 * 25 + 6, 16 * 150 + 16, 64 * 120 + 120, 120 * 84 + 84, 84 * 10 + 10]
    done = {"conv1": 1, "relu1": 1, "pool1": 1, "conv2": 2, "relu2": 2, "pool2": 2, "flatten": 2}
    done |= {"fc1": 3, "relu3": 3, "fc2": 4, "relu4": 4}
    for name, layers in done.items():
        place = places[name]
        assert place.possible
        assert place.method == "trace"
        assert place.multiply_adds == (sum(products[:layers]), sum(products[layers:]))
        assert place.parameters == (sum(weights[:layers]), sum(weights[layers:]))
    assert places["pool1"].values == (CutValue("pool1", (6, 4, 4), FLOAT, True),)
    assert (places["pool1"].forward_bytes, places["pool1"].backward_bytes, places["pool1"].bytes) == (384, 384, 768)
    assert places["fc3"].refusal == "cut 'fc3' leaves an empty segment after 'fc3'"
    assert not places["fc3"].possible


COUNTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lenet": (lambda: lenet((1, 8, 8), 10), "pool1"),
    "two values": (residual, "block.conv1"),
    "replayed": (Gated, "stem"),
}


@pytest.mark.parametrize("case", COUNTED)
def test_bytes_are_those_counted_in_a_training_step(case: str) -> None:
    make, name = COUNTED[case]
    x, y = images(7)
    model = seeded(make)
    place = residual_places()[name] if make is residual else by_name(model, x, 1)[name]
    topology = vanilla(model, name, example=x)
    engine = engine_of(topology, x, y)
    engine.train(0, 0, [torch.arange(7)])
    assert place.forward_bytes * 7 == engine.traffic.bytes(kind="activation") > 0
    assert place.backward_bytes * 7 == engine.traffic.bytes(kind="gradient")
    facts = pass_example(topology, dict.fromkeys(topology.inputs, x[:2]))
    flops = [cost.forward / 2 for cost in segment_flops(topology, facts).values()]
    assert list(place.multiply_adds) == flops
    assert sum(place.multiply_adds) > 0


def test_a_value_without_a_gradient_does_not_come_back() -> None:
    place = by_name(seeded(Stopped), torch.rand(8, 4))["body"]
    assert {value.shape: value.returned for value in place.values} == {(5,): True, (3,): False}
    assert (place.forward_bytes, place.backward_bytes) == (4 * 8, 4 * 5)


class Joined(nn.Module):
    """Reads two inputs, the second one behind `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(7, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([self.first(a), b], 1))
        return out


def test_raw_data_that_is_read_behind_a_cut_alone_is_a_refusal_as_it_is_to_vanilla() -> None:
    rows = torch.rand(8, 4)
    refusal = "the input 'b' is read behind this cut: raw data never crosses; cut elsewhere, or allow it"
    for example in (rows, {"a": rows, "b": rows}):
        assert by_name(seeded(Joined), example)["first"].refusal == f"{refusal} by sent_inputs=('b',)"
    with pytest.raises(InvalidInput, match="reads 'b', raw data"):
        vanilla(seeded(Joined), "first", example=example)
    (first, _) = cut_places(seeded(Joined), example, sent_inputs=("b",))
    assert {value.shape for value in first.values} == {(3,), (4,)}


def test_raw_data_that_is_read_on_both_sides_is_a_refusal() -> None:
    places = by_name(seeded(lambda: Stopped(raw=True)), torch.rand(8, 4))
    for name in ("stem", "body"):
        refusal = "the input 'x' is read on both sides of this cut: raw data never crosses; cut elsewhere, or allow it"
        assert places[name].refusal == f"{refusal} by sent_inputs=('x',)"


def test_a_skip_crosses_inside_a_block_and_a_container_is_its_last_child() -> None:
    model, places = seeded(residual), residual_places()
    assert [(v.name, v.shape) for v in places["block.conv1"].values] == [
        ("block_conv1", (2, 8, 8)),
        ("conv", (2, 8, 8)),
    ]
    assert places["block"].aliases == ("block.relu2",)
    assert [value.shape for value in places["block"].values] == [(2, 8, 8)]
    # Nothing is computed between the two: the shortcut of equal shapes is the identity.
    assert places["block.bn2"].aliases == ("block.shortcut",)
    assert "block.relu2" not in places
    shares = [place.multiply_adds[0] for place in places.values() if place.possible]
    assert shares == sorted(shares)
    told = [name for place in places.values() for name in (place.name, *place.aliases)]
    assert sorted(told) == sorted(name for name, _ in model.named_modules() if name)


def test_every_call_of_a_submodule_is_a_place() -> None:
    places = by_name(seeded(Repeated), torch.rand(8, 4))
    assert list(places) == ["stem", "core#1", "act#1", "core", "act", "two.0", "two", "spare"]
    tied = "parameter 'core.weight' would be shared by roles 'client' and 'server'"
    for name in ("core#1", "act#1"):
        assert str(places[name].refusal).startswith(tied)
    assert (places["core"].aliases, places["act"].aliases) == (("core#2",), ("act#2",))
    # A weight that is never read stays with what stands before it.
    assert places["core"].parameters == (30 + 42 + 6, 35 + 12)
    assert str(places["two"].refusal).endswith("leaves an empty segment after 'two'")
    assert places["two"].aliases == ("two.1",)
    assert places["two"].called
    assert places["spare"].refusal == "submodule 'spare' is never called by Repeated; nothing to cut after"
    assert not places["spare"].called
    only = seeded(lambda: nn.Sequential(nn.Linear(4, 4), act := nn.ReLU(), nn.Linear(4, 4), act, nn.Linear(4, 2)))
    assert by_name(only, torch.rand(8, 4))["1#1"].method == "replay"


def test_a_tied_weight_is_refused_where_it_would_be_parted() -> None:
    places = by_name(seeded(Tied), torch.rand(8, 6))
    assert "weights tied across a cut" in str(places["mid"].refusal)
    assert [name for name, place in places.items() if place.possible] == ["start", "back"]
    assert places["start"].parameters == (42, 42 + 6 + 42)


def test_a_model_that_cannot_be_traced_is_replayed() -> None:
    rows = words(8)
    places = by_name(encoder(blocks=1), {"words": rows}, depth=2)
    possible = {name: place.method for name, place in places.items() if place.possible}
    assert possible == dict.fromkeys(("words", "places", "blocks.0"), "replay")
    # The table of places has no batch, and crosses for every row.
    assert [value.shape for value in places["places"].values] == [(6, 8), (6, 8)]
    assert places["blocks.0"].values == (CutValue("blocks_0", (6, 8), FLOAT, True),)
    assert places["blocks.0"].parameters[0] == sum(
        weight.numel() for weight in cut(encoder(blocks=1), "blocks.0", rows)[0].module.parameters()
    )
    assert [name for name, place in places.items() if not place.called] == ["blocks"]
    assert [place.depth for place in places.values()] == [1, 1, 2, 1, 1]
    assert deepest(encoder()) == 4


def test_the_model_is_left_as_it_was_and_progress_is_told() -> None:
    model = seeded(residual).eval()
    model.get_submodule("conv").train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    generator, told = torch.get_rng_state(), list[tuple[int, int]]()
    cut_places(model, images(8)[0], 1, lambda done, total: told.append((done, total)))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(generator, torch.get_rng_state())
    assert told == [(i, 4) for i in range(5)]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "depth": (lambda: cut_places(Repeated(), torch.rand(8, 4), 0), "depth=0 is not allowed; expected a whole number"),
    "one row": (lambda: cut_places(Repeated(), torch.rand(1, 4)), "example has 1 rows for the input 'x'; expected at"),
    "no rows": (lambda: cut_places(Repeated(), None), "example is a NoneType; expected rows of the input"),  # type: ignore[arg-type]
    "no model": (lambda: cut_places("lenet", torch.rand(8, 4)), "model is a str; expected an nn.Module"),  # type: ignore[arg-type]
    "misfit": (lambda: cut_places(Repeated(), torch.rand(8, 3)), "Repeated fails by itself with 2 rows: mat1 and mat2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_listed_is_one_line(case: str) -> None:
    act, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as raised:
        act()
    assert "\n" not in str(raised.value)
