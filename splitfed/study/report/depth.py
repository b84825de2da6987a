"""How deep in the model a party sits: the steps that the raw data go through before anything arrives there."""

from __future__ import annotations

from splitfed.core.topology import Segment, Topology


def input_depth(topology: Topology, role: str) -> int:
    """Return the most steps (modules without parts of their own) between an input and what arrives at `role`.

    0 where nothing but raw data of its own does. A module that holds others counts by them, a bare one as one step,
    so within one model a later cut is a greater depth.
    """
    known: dict[str, int] = dict.fromkeys(topology.inputs, 0)
    for segment in topology.segments:
        done = max((known[value] for value in segment.inputs), default=0) + _count_modules(segment)
        known |= dict.fromkeys(segment.outputs, done)
    arriving = [e for e in topology.crossings if topology.role_of(e.target) == role]
    return max((known[value] for edge in arriving for value in edge.values), default=0)


def _count_modules(segment: Segment) -> int:
    return sum(not list(module.children()) for module in segment.module.modules())
