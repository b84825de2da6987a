"""Bytes of values and of weights of a topology, from shapes and element sizes alone.

The messages of a whole run are counted from them by `planning.counting`.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from splitfed.core.topology import Topology, weights
from splitfed.core.topology_facts import TopologyFacts


def value_bytes(facts: TopologyFacts, value: str) -> int:
    """Return the bytes of one row of `value`."""
    return prod(facts.shapes[value]) * facts.dtypes[value].itemsize


def forward_bytes(topology: Topology, facts: TopologyFacts, rows: int) -> int:
    """Return the bytes of all activations sent for `rows` rows."""
    return sum(value_bytes(facts, value) for edge in topology.crossings for value in edge.values) * rows


def weight_bytes(topology: Topology, role: str, buffers: bool = True, kept: Collection[str] = ()) -> int:
    """Return the bytes of one hand-over of `role`: all its weights, and its buffers if `buffers` is set.

    The segments in `kept` are left out.
    """
    return sum(
        t.numel() * t.element_size()
        for segment in topology.segments_of(role)
        if segment.name not in kept
        for t in (segment.module.state_dict() if buffers else weights(segment.module)).values()
    )
