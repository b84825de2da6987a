"""What a model's forward reads on one side of a cut alone no other party holds: of it they have a form without numbers.

Whatever keeps the numbers: tensors, arrays, containers, objects, functions and references, by trace and by replay.
"""

from __future__ import annotations

import array
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from splitfed.topologies import local, multi_hop, u_shaped, vanilla, vertical
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


class Slotted:
    __slots__ = ("table",)

    def __init__(self, table: Any) -> None:
        self.table = table


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
        if isinstance(thing, Tensor) and not thing.is_meta and thing.is_floating_point():
            found = thing.detach().numpy()
        elif (
            isinstance(thing, (float, np.ndarray, array.array)) and not getattr(thing, "dtype", wanted.dtype).hasobject
        ):
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


def test_pieces_of_a_cut_model_keep_to_themselves_in_a_vertical_topology() -> None:
    first, second = cut(Reading("array", 0), ("before:second",), EXAMPLE)
    right = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH))
    top = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), second.module)
    assert not holds_numbers(second.module)
    check_segments(vertical({"left": first.module, "right": right}, top, labels="right"), "left")


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
