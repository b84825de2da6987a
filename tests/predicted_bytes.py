"""The bytes of a training step by a formula that plays no schedule: what plans and runs are compared with.

Paper: Singh, Vepakomma, Gupta, Raskar, "Detailed comparison of communication efficiency of split learning and federated
learning", 2019, counts (2p/K)q floats a client and epoch for p examples and a cut of width q; here all other traffic is
included: labels, the element size, the last short batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.bytes import forward_bytes, value_bytes


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


def epoch_bytes(topology: Topology, facts: TopologyFacts, batches: Iterable[int], label_bytes: int = 8) -> int:
    """Return the bytes of one epoch over `batches` (rows of each)."""
    return sum(step_bytes(topology, facts, rows, label_bytes) for rows in batches)
