"""Segments run on an adversary's own machine: by hand, on a chain of three layers that double, add and halve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.defense import PenaltyDefense, ReleaseDefense
from splitfed.core.defense_context import Context
from splitfed.core.example_pass import pass_example
from splitfed.core.topology import Head, Segment, Topology
from splitfed.threats.fresh_segments import head_after
from splitfed.threats.segment_runner import SegmentRunner
from tests.object_graph import reachable


@dataclass(frozen=True)
class Shift(ReleaseDefense, PenaltyDefense):
    """Adds 100 at its mean, and the number of the draw otherwise; penalizes the sum of z."""

    def edges(self, topology: Topology) -> tuple[str, ...]:
        return ("bottom->middle",)

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z + context.stamp.epoch

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z + 100

    def penalty(self, z: Tensor, context: Context) -> Tensor:
        assert set(context.inputs) == {"x"}
        return z.sum() * (1 + context.epoch)


def times(factor: float) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, factor)
    return made


def chain() -> Topology:
    segments = (
        Segment("bottom", "client", times(2.0), ("x",), ("a",)),
        Segment("middle", "server", nn.Sequential(nn.ReLU(inplace=True), times(3.0)), ("a",), ("b",)),
        Segment("head", "client", times(0.5), ("b",), ("out",)),
    )
    return Topology("chain", segments, {"x": "client"}, (Head("out", "client", "client"),))


TOPOLOGY = chain()
FACTS = pass_example(TOPOLOGY, {"x": torch.ones(2, 1)})
MODULES = {s.name: s.module for s in TOPOLOGY.segments}
ONE = torch.ones(1, 1)


def runner(**changes: Any) -> SegmentRunner:
    return SegmentRunner(TOPOLOGY, FACTS, MODULES, lambda x: {"x": x}, **changes)


def numbers(found: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items()}


def test_up_to_a_role_up_to_values_and_from_values_on() -> None:
    assert numbers(runner(role="server")(ONE)) == {"a": 2.0}
    assert numbers(runner(role="client")(ONE)) == {"b": 6.0}
    assert numbers(runner(values={"out": "out", "sent": "a"})(ONE)) == {"out": 3.0, "sent": 2.0}
    own = runner(values={"b": "b"}, given={"a"})
    assert set(own.modules) == {"middle"}
    released = torch.full((1, 1), 5.0)
    assert numbers(own(ONE, {"a": released})) == {"b": 15.0}
    negative = torch.full((1, 1), -5.0)
    assert numbers(own(ONE, {"a": negative})) == {"b": 0.0}
    assert float(negative) == -5.0, "an operation in place stays with the copy"


def test_defenses_at_their_mean_drawn_and_in_training() -> None:
    found = runner(role="client", defenses=[Shift()], epoch=4)
    assert numbers(found(ONE)) == {"b": 306.0}
    releases, penalty, weight = found.in_training(ONE, 7)
    assert (float(penalty), weight) == (10.0, 1.0)
    assert numbers(releases) == {"b": 27.0}
    assert numbers(found.sample(ONE, 3)) == {"b": 15.0}
    assert [numbers(found.sample(ONE))["b"] for _ in range(2)] == [9.0, 12.0]
    assert float(found.in_training(ONE, 7, epoch=0)[1]) == 2.0
    assert float(runner(role="client").in_training(ONE)[1]) == 0.0
    assert found.least_rows == 1


def test_copies_are_frozen_but_for_those_that_may_learn() -> None:
    found = runner(role="client", trainable={"bottom"})
    assert [tuple(p.shape) for p in found.parameters()] == [(1, 1)]
    x = torch.ones(1, 1, requires_grad=True)
    found(x)["b"].sum().backward()
    assert x.grad is not None
    assert float(x.grad) == 6.0
    assert all(p.grad is None for module in MODULES.values() for p in module.parameters())
    (weight,) = found.parameters()
    assert float(weight.grad) == 3.0  # type: ignore[arg-type]
    assert not any(module.training for module in found.modules.values())


@pytest.mark.parametrize("changes", [{"role": "server"}, {"values": {"b": "b"}, "given": {"a"}}])
def test_no_module_of_the_run_can_be_reached(changes: dict[str, Any]) -> None:
    held = {id(m) for module in MODULES.values() for m in module.modules()}
    assert not any(id(thing) in held for thing in reachable(runner(**changes)))


def test_which_segments_lead_from_some_values_to_others() -> None:
    assert TOPOLOGY.makers(["out"]) == ("bottom", "middle", "head")
    assert TOPOLOGY.makers(["out"], given={"b"}) == ("head",)
    assert TOPOLOGY.makers(["b"], given={"b"}) == ()
    # Drawn with one input, the head's one weight lies in [-1, 1].
    draw = head_after(TOPOLOGY, "server", 1)
    assert draw is not None
    assert abs(float(draw()(ONE).detach())) <= 1.0
    assert head_after(TOPOLOGY, "client", 1) is None, "its own head stands behind what it sends"
