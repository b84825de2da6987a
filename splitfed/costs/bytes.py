"""Predicted bytes of a training step of a topology, from shapes and element sizes alone.

Paper: Singh, Vepakomma, Gupta, Raskar, "Detailed comparison of communication efficiency of split learning and federated
learning", 2019, counts (2p/K)q floats a client and epoch for p examples and a cut of width q; here all other traffic is
included: labels, the element size, the last short batch, weights handed over. Predicted bytes equal the counted ones
exactly; data that a defense packs is counted by `planning.counting`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

from splitfed.core.topology import Topology, weights
from splitfed.core.topology_facts import TopologyFacts


def value_bytes(facts: TopologyFacts, value: str) -> int:
    """Return the bytes of one row of `value`."""
    return prod(facts.shapes[value]) * facts.dtypes[value].itemsize


def forward_bytes(topology: Topology, facts: TopologyFacts, rows: int) -> int:
    """Return the bytes of all activations sent for `rows` rows."""
    return sum(value_bytes(facts, value) for edge in topology.crossings for value in edge.values) * rows


def backward_bytes(topology: Topology, facts: TopologyFacts, rows: int) -> int:
    """Return the bytes of all gradients sent back for `rows` rows."""
    returned = (facts.returned(topology, edge) for edge in topology.crossings)
    return sum(value_bytes(facts, value) for values in returned for value in values) * rows


def step_bytes(topology: Topology, facts: TopologyFacts, rows: int, label_bytes: int = 8) -> int:
    """Return the bytes that one training step of `rows` rows sends: activations, gradients and labels.

    `label_bytes`: the size of one row's label (8 for class numbers); it counts once a hop.
    """
    labels = sum(label_bytes * (len(head.path) - 1) for head in topology.heads)
    return forward_bytes(topology, facts, rows) + backward_bytes(topology, facts, rows) + labels * rows


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


def epoch_bytes(topology: Topology, facts: TopologyFacts, batches: Iterable[int], label_bytes: int = 8) -> int:
    """Return the bytes of one epoch over `batches` (rows of each)."""
    return sum(step_bytes(topology, facts, rows, label_bytes) for rows in batches)
