"""Floating-point operations of a training step for each segment, forward and backward, per row.

Measured on a real forward and backward pass by torch's own counter, which counts only matrix products, convolutions and
attention: activations, normalisation, pooling, losses and optimizer steps count zero. A product of (m, k) with (k, n)
is 2mkn operations.
"""

from __future__ import annotations

from typing import NamedTuple

from splitfed.core.errors import check_count
from splitfed.core.flop_counter import flop_counter
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.measure import rehearsal

_ROWS = 2  # batch norm refuses a single row in training


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
