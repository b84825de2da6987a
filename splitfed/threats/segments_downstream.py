"""What stands behind a party: from what it sends to the outputs at a head of somebody else, with fresh weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive
from splitfed.core.topology import Segment, Topology
from splitfed.threats.retraining import fresh


def head_after(topology: Topology, role: str, seed: int) -> Callable[[], nn.Module] | None:
    """Return what draws the architecture from the one value that `role` sends to the outputs at another's head.

    Every call draws weights anew from `seed`; none of the trained ones can be reached. None where the head's segments
    read anything else, or cannot be drawn.
    """
    sent = {v for e in topology.crossings if topology.role_of(e.source) == role for v in e.values}
    for head in topology.heads:
        if head.role == role:
            continue
        segments = _between(topology, sent, head.value, role)
        if segments is None:
            continue
        own_segments = {s.name for s in segments}
        blank = tuple(
            s if s.name in own_segments else replace(s, module=nn.Identity(), original=None) for s in topology.segments
        )
        try:
            redrawn = fresh(replace(topology, segments=blank), derive(seed, 0))
        except InvalidInput:
            return None
        return _Maker(redrawn, tuple(s.name for s in segments), seed)
    return None


class _Maker:
    """Draws the segments `names` of `topology`, which holds fresh weights only."""

    def __init__(self, topology: Topology, names: tuple[str, ...], seed: int) -> None:
        self._topology, self._names, self._seed, self._calls = topology, names, seed, 0

    def __call__(self) -> nn.Module:
        self._calls += 1
        drawn = fresh(self._topology, derive(self._seed, self._calls))
        return _Chain([drawn.segment(name) for name in self._names])


class _Chain(nn.Module):
    """Segments one after another, each on the one value that the one before it returns."""

    def __init__(self, segments: list[Segment]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(s.module for s in segments)

    def forward(self, z: Tensor) -> Tensor:
        for part in self.parts:
            # A segment may begin with an operation in place.
            z = part(z.clone())
        return z


def _between(topology: Topology, sent: set[str], value: str, role: str) -> list[Segment] | None:
    """Return the segments, in order, of the plain chain from a value in `sent` to `value`; None if it is no chain."""
    maker = {v: s for s in topology.segments for v in s.outputs}
    found: list[Segment] = []
    while value not in sent:
        segment = maker.get(value)
        if segment is None or segment.role == role or len(segment.inputs) != 1 or len(segment.outputs) != 1:
            return None
        found.append(segment)
        value = segment.inputs[0]
    return found[::-1] or None
