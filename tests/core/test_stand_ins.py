"""What a model's forward reads on one side of a cut alone no other party holds: of it they have a form without numbers.

Whatever keeps the numbers: tensors, arrays, containers, objects, functions and references, by trace and by replay.
"""

from __future__ import annotations

import array
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import splitfed as sf
from splitfed.core.cutting import cut
from splitfed.core.party import Party
from splitfed.core.replay import ReplayedSegment
from splitfed.core.topology import Topology
from splitfed.planning.held_rows import arrays_of, lines_held
from splitfed.topologies import extended_vanilla, local, multi_hop, multi_task, u_shaped, vanilla, vertical
from tests.core.test_isolation import trained_on_digits
from tests.object_graph import reachable

WIDTH = 8
NUMBERS = [1.0 + (2 * i + 1) / 1024 for i in range(WIDTH)]
"""Numbers that nothing else holds."""
EXAMPLE = torch.linspace(-1.0, 1.0, 8 * 64).view(8, 1, 8, 8)


@dataclass(frozen=True)
class Frozen:
    table: Any

    def scale(self, h: Tensor) -> Tensor:
        return h * torch.as_tensor(self.table, dtype=torch.float32)

    def first(self, count: int) -> Any:
        return self.table[:count]


class Slotted:
    __slots__ = ("table",)

    def __init__(self, table: Any) -> None:
        self.table = table


class Slope(NamedTuple):
    by: float
    inner: Any = ()


class Named(list[float]):
    """A list with an attribute."""


class Averaged:
    """Keeps a module that is no submodule of the model, as a moving average of weights does."""

    def __init__(self) -> None:
        self.shadow = teacher()

    def __call__(self, h: Tensor) -> Tensor:
        return self.shadow(h)  # type: ignore[no-any-return]


def teacher() -> nn.Module:
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    for weight in made.parameters():
        weight.data.copy_(torch.tensor(NUMBERS).expand_as(weight))
        weight.requires_grad_(False)
    return made


def nested(depth: int) -> tuple[Any, ...]:
    return tuple(nested(depth - 1) if depth else NUMBERS[i] for i in range(4))


def named_list() -> Named:
    made = Named()
    made.table = list(NUMBERS)  # type: ignore[attr-defined]
    return made


def itself() -> list[Any]:
    made: list[Any] = list(NUMBERS)
    return [*made, made.append(made)]


class Array(np.ndarray[Any, Any]):
    """An array that weak references may lead to."""


def as_weak_array() -> Array:
    return np.array(NUMBERS, dtype=np.float32).view(Array)


def scale(h: Tensor, table: Any) -> Tensor:
    return h * torch.as_tensor(table, dtype=torch.float32)


def closure() -> Callable[[Tensor], Tensor]:
    table = np.array(NUMBERS, dtype=np.float32)
    return lambda h: scale(h, table)


def tensor() -> Tensor:
    return torch.tensor(NUMBERS)


KEPT: Array = as_weak_array()
KEPT_OBJECT = Frozen(list(NUMBERS))
PARTS: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Any], Tensor]]] = {
    "tensor": (tensor, lambda h, kept: h * kept),
    "tensor in a dict": (lambda: {"a": [tensor()]}, lambda h, kept: h * kept["a"][0]),
    "list": (lambda: list(NUMBERS), scale),
    "short list": (lambda: NUMBERS[:3], lambda h, kept: h * kept[1]),
    "tuple": (lambda: tuple(NUMBERS), scale),
    "deque": (lambda: deque(NUMBERS), lambda h, kept: scale(h, list(kept))),
    "dict": (lambda: dict(enumerate(NUMBERS)), lambda h, kept: scale(h, list(kept.values()))),
    "array": (lambda: np.array(NUMBERS), scale),
    "array of array": (lambda: array.array("d", NUMBERS), lambda h, kept: scale(h, list(kept))),
    "bytes": (lambda: np.array(NUMBERS).tobytes(), lambda h, kept: scale(h, np.frombuffer(kept).copy())),
    "objects": (lambda: np.array(NUMBERS, dtype=object), lambda h, kept: scale(h, kept.tolist())),
    "dataclass": (lambda: Frozen(np.array(NUMBERS)), lambda h, kept: kept.scale(h)),
    "namespace": (lambda: types.SimpleNamespace(a=Frozen(list(NUMBERS))), lambda h, kept: kept.a.scale(h)),
    "slots": (lambda: Slotted(list(NUMBERS)), lambda h, kept: scale(h, kept.table)),
    "closure": (closure, lambda h, kept: kept(h)),
    "default": (lambda: lambda h, table=list(NUMBERS): scale(h, table), lambda h, kept: kept(h)),
    "partial": (lambda: partial(scale, table=tensor()), lambda h, kept: kept(h)),
    "bound method": (lambda: Frozen(list(NUMBERS)).scale, lambda h, kept: kept(h)),
    "weak reference": (lambda: weakref.ref(KEPT), lambda h, kept: scale(h, np.asarray(kept()))),
    "keys": (lambda: dict.fromkeys(NUMBERS, "a"), lambda h, kept: scale(h, list(kept))),
    "keys in tuples": (lambda: {(0, one): "a" for one in NUMBERS}, lambda h, kept: scale(h, [b for _, b in kept])),
    "set": (lambda: set(NUMBERS), lambda h, kept: scale(h, sorted(kept))),
    "fractions": (lambda: [Fraction(one) for one in NUMBERS], lambda h, kept: scale(h, list(map(float, kept)))),
    "keys that are fractions": (lambda: {Fraction(one): 0 for one in NUMBERS}, lambda h, kept: h * len(kept)),
    "decimals": (lambda: [Decimal(one) for one in NUMBERS], lambda h, kept: scale(h, list(map(float, kept)))),
    "short tuple": (lambda: tuple(NUMBERS[:3]), lambda h, kept: h * kept[1]),
    "nested tuples": (lambda: nested(2), lambda h, kept: h * kept[1][2][3]),
    "named tuples": (lambda: Slope(NUMBERS[0], Slope(NUMBERS[1])), lambda h, kept: h * kept.by * kept.inner.by),
    "objects of one number": (lambda: [Frozen(one) for one in NUMBERS], lambda h, kept: kept[1].scale(h)),
    "attribute of a list": (named_list, lambda h, kept: scale(h, kept.table)),
    "list that holds itself": (itself, lambda h, kept: scale(h, kept[:WIDTH])),
    "ordered dict": (lambda: OrderedDict(enumerate(NUMBERS)), lambda h, kept: scale(h, list(kept.values()))),
    "method of a dict": (lambda: dict(enumerate(NUMBERS)).get, lambda h, kept: scale(h, [kept(i) for i in range(8)])),
    "proxy": (lambda: weakref.proxy(KEPT_OBJECT), lambda h, kept: kept.scale(h)),
    "cached method": (lambda: lru_cache(Frozen(list(NUMBERS)).first), lambda h, kept: scale(h, kept(WIDTH))),
    "module in a list": (lambda: [teacher()], lambda h, kept: h + kept[0](h)),
    "module in an object": (Averaged, lambda h, kept: h + kept(h)),
}


class Reading(nn.Module):
    """Reads what it keeps in one of its three parts, 0, 1 or 2; by replay where it draws in `forward`."""

    def __init__(self, name: str, place: int, replayed: bool = True) -> None:
        super().__init__()
        make, self.read = PARTS[name][0], PARTS[name][1]
        self.kept, self.place, self.replayed = make(), place, replayed
        self.flat = nn.Flatten()
        self.first, self.second, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.flat(x))
        if self.place == 0:
            h = self.read(h, self.kept)
        h = torch.relu(h)
        if self.replayed:
            h = functional.dropout(h, 0.0, training=self.training)
        h = self.second(h)
        if self.place == 1:
            h = self.read(h, self.kept)
        logits: Tensor = self.head(torch.tanh(h))
        return self.read(logits[:, :WIDTH], self.kept) if self.place == 2 else logits


SHAPES: dict[str, Callable[[nn.Module], Topology]] = {
    "vanilla": lambda net: vanilla(net, "before:second", example=EXAMPLE),
    "u_shaped": lambda net: u_shaped(net, ("before:second", "before:head"), example=EXAMPLE),
    "multi_hop": lambda net: multi_hop(net, ("before:second", "before:head"), example=EXAMPLE),
    "local": lambda net: local(net, ("before:second",), example=EXAMPLE),
}
HOLDERS = {
    "vanilla": ("client", "server", "server"),
    "u_shaped": ("client", "server", "client"),
    "multi_hop": ("client", "hop1", "hop2"),
    "local": ("client", "client", "client"),
}


def holds_numbers(party: Party | nn.Module) -> bool:
    """Return whether a party, or its segment, reaches one of `NUMBERS`, in whatever keeps it."""
    wanted = np.array(NUMBERS)
    for thing in reachable(party):
        found: Any = ()
        if isinstance(thing, Number) and not isinstance(thing, complex):
            found = np.asarray(float(thing))  # type: ignore[arg-type]
        elif isinstance(thing, Tensor) and not thing.is_meta and thing.is_floating_point():
            found = thing.detach().numpy()
        elif isinstance(thing, (np.ndarray, array.array)) and not getattr(thing, "dtype", wanted.dtype).hasobject:
            found = np.asarray(thing)
        elif isinstance(thing, (bytes, bytearray)) and len(thing) % 8 == 0:
            found = np.frombuffer(thing)
        if len(found := np.ravel(found)) and np.isin(found, wanted).any():
            return True
    return False


def make(shape: str, name: str, place: int, replayed: bool = True) -> Topology:
    topology = SHAPES[shape](Reading(name, place, replayed))
    assert any(isinstance(segment.module, ReplayedSegment) for segment in topology.segments) or not replayed
    return topology


def check_segments(topology: Topology, holder: str) -> None:
    assert {segment.role for segment in topology.segments if holds_numbers(segment.module)} == {holder}
    assert {role for role in topology.roles if arrays_of(topology, role)} <= {holder}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", [name for name in PARTS if name != "weak reference"])
def test_a_party_holds_nothing_that_another_one_alone_reads(name: str, place: int) -> None:
    check_segments(make("vanilla", name, place), HOLDERS["vanilla"][place])


def test_what_a_weak_reference_leads_to_is_not_reached_from_another_party() -> None:
    check_segments(make("vanilla", "weak reference", 0), "client")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["tensor", "dataclass", "partial"])
def test_in_no_topology_does_a_segment_hold_what_another_one_reads(shape: str, place: int, name: str) -> None:
    check_segments(make(shape, name, place), HOLDERS[shape][place])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["tensor", "array", "closure"])
def test_after_training_no_party_holds_what_another_one_reads(shape: str, name: str) -> None:
    engine = trained_on_digits(make(shape, name, 0))
    assert {party.state.role for party in engine.parties.values() if holds_numbers(party)} == {"client"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["tensor", "list", "dataclass"])
def test_by_trace_no_party_holds_what_another_one_reads(shape: str, name: str) -> None:
    check_segments(make(shape, name, 0, replayed=False), "client")


def of_pieces(shape: str, name: str, place: int) -> Topology:
    """Return a topology of several feature parties, of which one and those behind it run the pieces of a cut model."""
    hop = shape == "extended_vanilla"
    pieces = cut(Reading(name, place), ("before:second", "before:head")[: 1 + hop], EXAMPLE)
    assert all(isinstance(piece.module, ReplayedSegment) for piece in pieces)
    first, second, *rest = (piece.module for piece in pieces)
    bottoms = {"left": first, "right": nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH))}
    behind = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), second)
    if hop:
        return extended_vanilla(bottoms, behind, rest[0], labels="right")
    if shape == "multi_task":
        other = nn.Linear(2 * WIDTH, 4)
        return multi_task(bottoms, {"server": behind, "other": other}, targets={"server": None, "other": "b"})
    return vertical(bottoms, behind, labels="right")


@pytest.mark.parametrize("shape", ["vertical", "extended_vanilla", "multi_task"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["tensor", "array", "nested tuples", "module in a list"])
def test_pieces_of_a_cut_model_keep_to_themselves_beside_several_feature_parties(
    shape: str, name: str, place: int
) -> None:
    behind = "relay" if shape == "extended_vanilla" else "server"
    check_segments(of_pieces(shape, name, place), ("left", behind)[place])


class HungOn(nn.Module):
    """Reads, before the cut, a tensor that is an attribute of a weight."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.first, self.second, self.reads = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10), reads
        self.first.bias.mean = tensor()  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        if self.reads:
            h = h + self.first.bias.mean  # type: ignore[operator, union-attr]
        return self.second(functional.dropout(h, 0.0, training=self.training))  # type: ignore[no-any-return]


@pytest.mark.parametrize("reads", [False, True])
def test_what_hangs_on_a_weight_is_with_who_holds_the_weight(reads: bool) -> None:
    topology = vanilla(HungOn(reads), "before:second", example=EXAMPLE)
    check_segments(topology, "client")
    assert lines_held(topology) == ["client holds the array 'bias.mean' of 'first' (8,)"]
    engine = trained_on_digits(topology)
    assert {party.state.role for party in engine.parties.values() if holds_numbers(party)} == {"client"}


class Sharing(Reading):
    """Reads on both sides of the cut."""

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.read(self.first(self.flat(x)), self.kept), 0.0, training=self.training)
        logits: Tensor = self.head(self.read(self.second(h), self.kept))
        return logits


class Early(Reading):
    """Looks up at the top what it uses on both sides, and a list that it uses on one."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 0)
        self.listed = list(NUMBERS)

    def forward(self, x: Tensor) -> Tensor:
        kept, listed = self.kept, self.listed
        h = scale(self.read(self.first(self.flat(x)), kept), listed)
        h = functional.dropout(h, 0.0, training=self.training)
        logits: Tensor = self.head(self.read(self.second(h), kept))
        return logits


@pytest.mark.parametrize("name", ["tensor", "array", "dataclass", "closure"])
def test_what_both_sides_use_both_hold_and_it_is_named(name: str) -> None:
    for net in (Sharing(name, 0), Early(name)):
        topology = vanilla(net, "before:second", example=EXAMPLE)
        assert "client and server hold the array 'kept' of the model (8,)" in lines_held(topology)
        assert ("client holds the array 'listed' of the model (8,)" in lines_held(topology)) is isinstance(net, Early)
        assert len(lines_held(topology)) == (2 if isinstance(net, Early) else 1)


def test_the_summary_of_a_run_names_what_is_held() -> None:
    topology = vanilla(Sharing("tensor", 0), "before:second", example=EXAMPLE)
    data = sf.data.from_arrays(EXAMPLE.repeat(8, 1, 1, 1) + torch.randn(64, 1, 1, 1), torch.arange(64) % 10)
    run = sf.train(topology, data.clients(1, auxiliary=4, victims=4), rounds=1)
    line = "client and server hold the array 'kept' of the model (8,)"
    assert ("arrays", line) in run.summary().rows


class Switched(Reading):
    """Reads what it keeps behind the cut too, once it is told to."""

    late: bool = False

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.read(self.first(self.flat(x)), self.kept), 0.0, training=self.training)
        h = self.second(h)
        if self.late:
            h = self.read(h, self.kept)
        logits: Tensor = self.head(h)
        return logits


@pytest.mark.parametrize("name", ["tensor", "list", "dataclass", "closure"])
def test_reading_it_later_is_an_error_and_gives_no_numbers(name: str) -> None:
    _, second = cut(Switched(name, 0), ("before:second",), EXAMPLE)
    h = torch.randn(4, WIDTH)
    assert bool(second.module(h).isfinite().all())
    vars(second.module)["late"] = True
    with pytest.raises(AttributeError, match="reads the attribute 'kept', which this party does not hold"):
        second.module(h)
    with pytest.raises(AttributeError, match="reads the attribute 'kept', which this party does not hold"):
        second.module.kept  # noqa: B018


class Buffered(nn.Module):
    """Reads a buffer that is not saved before the cut."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.register_buffer("kept", tensor(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.first(x.flatten(1)) * self.kept, 0.0, training=self.training)
        logits: Tensor = self.second(h)
        return logits


def test_a_buffer_that_is_not_saved_is_held_where_it_is_read() -> None:
    check_segments(vanilla(Buffered(), "before:second", example=EXAMPLE), "client")


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_attributes_of_a_parametrized_submodule_stay_with_its_party(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = Reading("tensor", 2)
    vars(net)["kept"] = None
    net.place = -1
    net.first.rows, net.first.listed = EXAMPLE.flatten(1), list(NUMBERS)  # type: ignore[assignment]
    net.first = wrap(net.first)  # type: ignore[assignment]
    topology = vanilla(net, "before:second", example=EXAMPLE)
    assert lines_held(topology) == []
    assert not any(holds_numbers(segment.module) for segment in topology.segments)


class Drawing(nn.Module):
    """Looks up a generator before the cut, and keeps under two names what it reads there."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator, self.draws = generator, False
        self.one = self.other = list(NUMBERS)
        self.unread = tuple((one,) for one in NUMBERS)
        self.first, self.second = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        generator = self.generator
        h = scale(scale(self.first(x.flatten(1)), self.one), self.other)
        if self.training and self.draws:
            h = h * torch.as_tensor(generator.random())
        return self.second(functional.dropout(h, 0.0, training=self.training))  # type: ignore[no-any-return]


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1234), torch.Generator.initial_seed),
    "numpy": (lambda: np.random.default_rng(1234), lambda one: one.bit_generator.state["state"]["inc"]),
    "python": (lambda: random.Random(1234), lambda one: one.getstate()[1][1]),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_the_seed_of_a_generator_that_another_party_reads_is_not_held(name: str) -> None:
    make, seed_of = GENERATORS[name]
    topology = vanilla(Drawing(make()), "before:second", example=EXAMPLE)
    held = {
        segment.role: {seed_of(one) for one in reachable(segment.module) if type(one) is type(make())}
        for segment in topology.segments
    }
    assert seed_of(make()) in held["client"]
    assert seed_of(make()) not in held["server"]
    check_segments(topology, "client")


class Steered(nn.Module):
    """Reads, before the cut, settings that its operations go by, beside numbers that they do not."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.first, self.second = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = scale(self.first(x.flatten(1)), self.settings.table)
        for _ in range(self.settings.layers):
            h = functional.dropout(h, self.settings.rate, training=self.training)
        return self.second(h)  # type: ignore[no-any-return]


def test_settings_that_steer_a_party_stay_where_the_numbers_beside_them_do_not() -> None:
    settings = types.SimpleNamespace(layers=2, rate=0.0, table=list(NUMBERS))
    check_segments(vanilla(Steered(settings), "before:second", example=EXAMPLE), "client")


def test_a_list_that_says_which_operations_run_is_held_by_all_whose_pass_goes_by_it() -> None:
    class Layers(list[Any]):
        @property
        def layers(self) -> int:
            return len([one for one in self if one > 1])

        rate, table = 0.0, 1.0

    topology = vanilla(Steered(Layers([*NUMBERS, 0.5])), "before:second", example=EXAMPLE)
    assert all(holds_numbers(segment.module) for segment in topology.segments)
    assert "client and server hold the array 'settings' of the model (9,)" in lines_held(topology)
