"""A run that goes on from a checkpoint has every bit of the unbroken one, whatever its segments keep beside weights."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitfed.core.equivalence import check_topology
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies import vanilla
from tests.examples import engine_of, read_back


class Keeping(nn.Module):
    """A layer and what it keeps of earlier batches."""

    def __init__(self, start: Callable[[Any], None], keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self._keep = nn.Linear(8, 8), keep
        start(self)

    def forward(self, x: Tensor) -> Tensor:
        return self._keep(self, torch.relu(self.fc(x)))


def in_buffer(m: Any, h: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(h.detach().mean(0))
    return h - m.mean


def in_attribute(m: Any, h: Tensor) -> Tensor:
    last = h if m.last is None else h + m.last
    m.last = h.detach().mean(0)
    return last


def in_list(m: Any, h: Tensor) -> Tensor:
    m.bank.append(h.detach().mean(0))
    return h + torch.stack(list(m.bank)).mean(0)


def in_dict(m: Any, h: Tensor) -> Tensor:
    state = m.state.setdefault("mean", {"value": torch.zeros(8), "seen": 0})
    state["value"] = 0.5 * state["value"] + h.detach().mean(0)
    state["seen"] += 1
    return h - state["value"] / state["seen"]


def in_tuple(m: Any, h: Tensor) -> Tensor:
    if m.hidden is not None:
        h = h + m.hidden[0] - m.hidden[1]
    m.hidden = (h.detach().mean(0), h.detach().amax(0))
    return h


def in_object(m: Any, h: Tensor) -> Tensor:
    m.cfg.step += 1
    return h / m.cfg.step


def of_growing_shape(m: Any, h: Tensor) -> Tensor:
    m.bank = torch.cat([m.bank, h.detach()[:2]])
    return h + m.bank.mean(0)


def under_two_names(m: Any, h: Tensor) -> Tensor:
    m.one.add_(h.detach().mean(0))
    return h + m.other


def cached(m: Any, h: Tensor) -> Tensor:
    if h.shape[1] not in m.tables:
        m.tables[h.shape[1]] = torch.sin(torch.arange(h.shape[1]) * 1.0)
    return h + m.tables[h.shape[1]]


def drawn(m: Any, h: Tensor) -> Tensor:
    return h * torch.rand(8, generator=m.random)


def scaled(m: Any, h: Tensor) -> Tensor:
    return h * float(m.random.random())


def of_numpy(m: Any, h: Tensor) -> Tensor:
    m.bank[0] += np.float32(0.25)
    return h * float(m.bank[0])


def of_range(m: Any, h: Tensor) -> Tensor:
    m.seen, m.raw[0] = range(len(m.seen) + 1), m.raw[0] + 1
    return h * len(m.seen) / m.raw[0]


def aliased(m: Any) -> None:
    m.one = torch.zeros(8)
    m.other = m.one


def with_(**values: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda m: [setattr(m, name, make()) for name, make in values.items()] and None


STATES: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor]]] = {
    "buffer_that_is_not_saved": (lambda m: m.register_buffer("mean", torch.zeros(8), persistent=False), in_buffer),
    "attribute": (with_(last=lambda: torch.zeros(8)), in_attribute),
    "attribute_none_at_first": (with_(last=lambda: None), in_attribute),
    "list": (with_(bank=list), in_list),
    "deque": (with_(bank=lambda: deque(maxlen=3)), in_list),
    "nested_dict": (with_(state=dict), in_dict),
    "tuple": (with_(hidden=lambda: None), in_tuple),
    "number_in_an_object": (with_(cfg=lambda: SimpleNamespace(step=0)), in_object),
    "growing_shape": (with_(bank=lambda: torch.zeros(1, 8)), of_growing_shape),
    "one_tensor_under_two_names": (aliased, under_two_names),
    "cache": (with_(tables=dict), cached),
    "numbers_of_numpy": (with_(bank=lambda: [np.float32(0.5)]), of_numpy),
    "range_and_bytes": (with_(seen=lambda: range(1), raw=lambda: bytearray(1)), of_range),
    "generator": (with_(random=lambda: torch.Generator().manual_seed(3)), drawn),
    "generator_of_python": (with_(random=lambda: random.Random(3)), scaled),
    "generator_of_numpy": (with_(random=lambda: np.random.default_rng(3)), scaled),
    "older_generator_of_numpy": (
        with_(random=lambda: np.random.RandomState(3)),
        lambda m, h: h * float(m.random.rand()),
    ),
}


def topology(name: str) -> Topology:
    start, keep = STATES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return by_hand(Keeping(start, keep))


def by_hand(bottom: nn.Module) -> Topology:
    top = nn.Linear(8, 4)
    segments = (
        Segment("bottom", "client", bottom, ("x",), ("h",)),
        Segment("top", "server", top, ("h",), ("out",)),
    )
    return Topology("by hand", segments, {"x": "client"}, (Head("out", "server", "client"),))


def check_resumed(make: Callable[[], Topology]) -> None:
    drawn = torch.Generator().manual_seed(5)
    x, y = torch.randn(24, 8, generator=drawn), torch.arange(24) % 4
    steps = list(torch.arange(24).split(8))
    unbroken, broken, resumed = (engine_of(make(), x, y) for _ in range(3))
    for round_ in range(4):
        unbroken.train(0, round_, steps)
    for round_ in range(2):
        broken.train(0, round_, steps)
    resumed.load_state(read_back(broken.state()))
    for round_ in range(2, 4):
        resumed.train(0, round_, steps)
    for segment, module in unbroken.modules(0).items():
        for key, value in module.state_dict().items():
            assert torch.equal(resumed.modules(0)[segment].state_dict()[key], value), key


@pytest.mark.parametrize("name", STATES)
def test_a_run_resumed_goes_on_as_the_unbroken_one(name: str) -> None:
    check_resumed(lambda: topology(name))


class Recurrent(nn.Module):
    """Adds the mean of what it saw before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x)) + self.last
        self.last = h.detach().mean(0)
        return self.c(self.b(h))


def test_a_replayed_segment_resumed_goes_on_as_the_unbroken_one() -> None:
    def make() -> Topology:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = Recurrent()
        return vanilla(model, "b", example=torch.ones(8, 8) * torch.arange(8.0))

    check_resumed(make)


SHARED = {"steps": 0}


class Mode(Enum):
    """No plain value, and a checkpoint makes no objects of such classes."""

    FIRST = 1
    LATER = 2


def in_enum(m: Any, h: Tensor) -> Tensor:
    m.mode = Mode.LATER
    return h


def by_enum(m: Any, h: Tensor) -> Tensor:
    m.table[Mode.LATER] = h.detach().mean(0)
    return h


def in_global(m: Any, h: Tensor) -> Tensor:
    SHARED["steps"] += 1
    return h


def in_iterator(m: Any, h: Tensor) -> Tensor:
    return h / next(m.numbers)


@pytest.mark.parametrize(
    ("start", "keep", "text"),
    [
        (with_(), in_global, "forward changes the global 'SHARED'"),
        (
            with_(numbers=lambda: iter(range(1, 999))),
            in_iterator,
            "changes the attribute 'numbers' of the model",
        ),
        (
            with_(last=lambda: None),
            lambda m, h: setattr(m, "last", SimpleNamespace(mean=h.detach().mean(0))) or h,
            "forward changes the attribute 'last' of the model",
        ),
        (with_(mode=lambda: Mode.FIRST), in_enum, "forward changes the attribute 'mode' of the model"),
        (with_(table=dict), by_enum, "forward changes"),
    ],
)
def test_state_that_a_checkpoint_cannot_hold_is_refused_before_training(
    start: Callable[[Any], None], keep: Callable[[Any, Tensor], Tensor], text: str
) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        check_topology(by_hand(Keeping(start, keep)), {"x": torch.randn(8, 8)})
    assert "which a checkpoint cannot hold; keep what changes in buffers" in str(caught.value)
