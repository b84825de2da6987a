"""Messages with weights that a schedule sends, computed from shapes and participants, for plans and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from splitfed.core.topology import Topology, member, weights
from splitfed.costs.bytes import weight_bytes
from splitfed.engines.base import FED, Placement
from splitfed.secure_sum.base import Flow


class WeightFlows:
    """Messages with weights of clients with `topologies` under `placement`, as a run sends them.

    For a secure sum it stores the clients selected for a round until the clients that finished are known.
    """

    def __init__(self, topologies: Sequence[Topology], placement: Placement) -> None:
        self._topologies, self._placement = tuple(topologies), placement
        self._asked: list[int] = []

    def hand_over(self, source: int, target: int, role: str, via: str | None = None) -> Iterator[Flow]:
        """Yield the messages that hand the weights of `role` over from one replica's party to another's."""
        stops = [member(role, source), *([] if via is None else [via]), member(role, target)]
        size = weight_bytes(self._topologies[source], role, kept=self._placement.kept)
        for sender, receiver in pairwise(stops):
            yield "weights", sender, receiver, size

    def download(self, replicas: Sequence[int]) -> Iterator[Flow]:
        """Yield the messages of the aggregation server to `replicas`, and those of a secure sum before training."""
        for replica in replicas:
            for role in self._placement.averaged:
                yield "weights", FED, member(role, replica), self._size(replica, role)
        if self._placement.secure is not None:
            self._asked = list(replicas)
            for role in self._placement.averaged:
                yield from self._placement.secure.setup_flows(self._asked, partial(member, role), FED)

    def upload(self, lane_weights: Mapping[int, float]) -> Iterator[Flow]:
        """Yield the uploads of clients that finished; raise `InvalidInput` for weights that a secure sum refuses."""
        done, secure = list(lane_weights), self._placement.secure
        if secure is not None:
            secure.check_weights(lane_weights.values())
            for role in self._placement.averaged:
                numbers = self._numbers(done[0], role)
                yield from secure.upload_flows(self._asked, done, numbers, partial(member, role), FED)
            return
        for replica in done:
            for role in self._placement.averaged:
                yield "weights", member(role, replica), FED, self._size(replica, role)

    def _size(self, replica: int, role: str) -> int:
        return weight_bytes(self._topologies[replica], role, self._placement.buffers, self._placement.kept)

    def _numbers(self, replica: int, role: str) -> int:
        place = self._placement
        return sum(
            tensor.numel()
            for segment in self._topologies[replica].segments_of(role)
            if segment.name not in place.kept
            for tensor in (segment.module.state_dict() if place.buffers else weights(segment.module)).values()
        )
