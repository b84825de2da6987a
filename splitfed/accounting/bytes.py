"""Predicted bytes: what a step of a topology must send, from shapes and element sizes alone.

Paper: Singh, Vepakomma, Gupta, Raskar, "Detailed comparison of communication efficiency of split learning and
federated learning", 2019, counts (2p/K)q floats a client and epoch for p examples and a cut q wide; here also what
else truly crosses: labels, the element size, the last short batch, weights handed over. Counted bytes equal these
exactly; a defense that changes the size of a release is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from splitfed.graph import Topology
from splitfed.probe import Facts


def forward_bytes(topology: Topology, facts: Facts, rows: int) -> int:
    """Return the bytes of all activations that cross for `rows` rows."""
    return sum(_value_bytes(facts, v) for edge in topology.crossings for v in edge.values) * rows


def step_bytes(topology: Topology, facts: Facts, rows: int, label_bytes: int = 8) -> int:
    """Return the bytes one training step of `rows` rows sends: activations, as many gradients, labels that cross.

    `label_bytes`: the size of one row's label (8 for class numbers).
    """
    labels = sum(label_bytes for head in topology.heads if head.labels != head.role)
    return 2 * forward_bytes(topology, facts, rows) + labels * rows


def weight_bytes(topology: Topology, role: str) -> int:
    """Return the bytes of all weights and buffers of `role`: one hand-over."""
    return sum(t.numel() * t.element_size() for s in topology.segments_of(role) for t in s.module.state_dict().values())


def epoch_bytes(topology: Topology, facts: Facts, batches: Iterable[int], label_bytes: int = 8) -> int:
    """Return the bytes of one epoch over `batches` (rows of each)."""
    return sum(step_bytes(topology, facts, rows, label_bytes) for rows in batches)


def _value_bytes(facts: Facts, value: str) -> int:
    return prod(facts.shapes[value]) * facts.dtypes[value].itemsize
