"""The messages of secure sums as a run will send them, for plans and clocks: from shapes and who takes part alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from splitfed.core.topology import Topology, member, weights
from splitfed.engines.base import FED, Placement
from splitfed.secure_sum.flows import Flow, setup_flows, upload_flows


class PlannedSums:
    """Remembers who was asked in a round, by the fused roles of `placement`, until those who finished are known."""

    def __init__(self, topologies: Sequence[Topology], placement: Placement) -> None:
        self._topologies, self._placement = topologies, placement
        self._asked: list[int] = []

    def open(self, lanes: Iterable[int]) -> Iterator[Flow]:
        """Yield the messages before the clients train."""
        self._asked = list(lanes)
        for role in self._placement.fused:
            yield from setup_flows(self._asked, _named(role), FED)

    def close(self, finished: Iterable[int]) -> Iterator[Flow]:
        """Yield the messages of the clients that finished."""
        done = list(finished)
        for role in self._placement.fused:
            yield from upload_flows(self._asked, done, self._numbers(done[0], role), _named(role), FED)

    def _numbers(self, lane: int, role: str) -> int:
        place = self._placement
        return sum(
            tensor.numel()
            for segment in self._topologies[lane].segments_of(role)
            if segment.name not in place.kept
            for tensor in (segment.module.state_dict() if place.buffers else weights(segment.module)).values()
        )


def _named(role: str) -> Callable[[int], str]:
    return partial(member, role)
