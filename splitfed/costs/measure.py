"""A copy of one segment run on artificial rows as in training, to measure its operations and its memory.

Operations are measured by torch's own counter, which counts only matrix products, convolutions and attention:
activations, normalisation, pooling, losses and optimizer steps count zero. A product of (m, k) with (k, n) is 2mkn
operations.

Modules, buffers and random state of the topology do not change. Gradients start from ones, not from a loss, so neither
labels nor a task are needed; the cost of a loss is negligible beside the segment's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.errors import check_count
from splitfed.core.flop_counter import flop_counter
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts

_ROWS = 2  # batch norm refuses a single row in training


@dataclass(frozen=True)
class Rehearsal:
    """A copy of one segment in training mode, its inputs, and which of its outputs receive a gradient."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    arguments: tuple[Tensor, ...]
    rooted: tuple[bool, ...]

    def forward(self) -> tuple[Tensor, ...]:
        """Run the segment; return its outputs."""
        result = self.module(*self.arguments)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def backward(self, outputs: tuple[Tensor, ...]) -> None:
        """Backpropagate gradients of ones from those `outputs` that receive a gradient in training."""
        if roots := [z for z, rooted in zip(outputs, self.rooted, strict=True) if rooted and z.requires_grad]:
            # Sums, as torch compares the shapes of given gradients by symbolic algebra, which takes long to load.
            torch.autograd.backward([(z.abs() if z.is_complex() else z).sum() for z in roots])


@contextmanager
def rehearsal(topology: Topology, segment: Segment, facts: TopologyFacts, rows: int) -> Iterator[Rehearsal]:
    """Yield `segment` ready to run on `rows` rows of ones (zeros for integer values, such as token ids).

    As in training, raw data needs no gradient, nor do values from an edge of `topology.forward_only`; an input that the
    segment overwrites is copied.
    """
    module = copy.deepcopy(segment.module)
    if not module.training:
        # A model in evaluation mode as a whole is trained all the same; frozen parts of it stay frozen.
        module.train()
    needy = set(segment.inputs) - set(topology.inputs) - _one_way_values(topology, segment.role)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        inputs = tuple(_dummy_values(facts, v, rows).requires_grad_(v in needy) for v in segment.inputs)
        overwritten = facts.overwritten[segment.name]
        arguments = tuple(x.clone() if v in overwritten else x for v, x in zip(segment.inputs, inputs, strict=True))
        wanted = {h.value for h in topology.heads}.union(*(facts.returned(topology, e) for e in topology.edges))
        yield Rehearsal(module, inputs, arguments, tuple(v in wanted for v in segment.outputs))


def _dummy_values(facts: TopologyFacts, value: str, rows: int) -> Tensor:
    shape, dtype = (rows, *facts.shapes[value]), facts.dtypes[value]
    return torch.ones(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _one_way_values(topology: Topology, role: str) -> set[str]:
    edges = (e for e in topology.crossings if topology.role_of(e.target) == role)
    return {v for e in edges if e.name in topology.forward_only for v in e.values}


class SegmentCost(NamedTuple):
    """Floating-point operations of one segment: `forward`, and `backward` for weights and inputs together."""

    forward: float
    backward: float


def segment_flops(topology: Topology, facts: TopologyFacts, rows: int = 1) -> dict[str, SegmentCost]:
    """Return segment -> operations of a training step of `rows` rows.

    Measured on two rows and scaled. The backward pass of a segment that reads only raw data is cheaper than that of a
    later one, because no gradient of its input is needed.
    """
    check_count("rows", rows, low=1)
    return {s.name: _measure_segment(topology, s, facts, rows / _ROWS) for s in topology.segments}


def role_flops(topology: Topology, facts: TopologyFacts, rows: int = 1) -> dict[str, float]:
    """Return role -> operations of a training step of `rows` rows, forward and backward."""
    costs = segment_flops(topology, facts, rows)
    return {role: sum((sum(costs[s.name]) for s in topology.segments_of(role)), 0.0) for role in topology.roles}


def _measure_segment(topology: Topology, segment: Segment, facts: TopologyFacts, scale: float) -> SegmentCost:
    with rehearsal(topology, segment, facts, _ROWS) as run:
        with flop_counter() as forward:
            outputs = run.forward()
        with flop_counter() as backward:
            run.backward(outputs)
    return SegmentCost(forward.get_total_flops() * scale, backward.get_total_flops() * scale)
