"""A simulated clock beside a trainer: whatever a schedule asks for is done, and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from splitfed.core.executor import Combine
from splitfed.core.topology import Topology, member
from splitfed.costs.bytes import weight_bytes
from splitfed.costs.clock import Clock, party_names
from splitfed.costs.flops import segment_flops
from splitfed.costs.speeds import Speeds
from splitfed.costs.steps import StepShape, step_shape
from splitfed.engines.base import FED, Placement, Trainer
from splitfed.planning.method_clock import Meeting
from splitfed.planning.secure_summation import PlannedSums
from splitfed.planning.validation import Prepared, labels_of


class Timed:
    """Passes everything on to `inner` and moves `clock` by what it takes. What is averaged in place takes no time.

    `meeting`: where a federated method leads the clients' training, what knows the steps that they really took.
    """

    def __init__(
        self,
        inner: Trainer,
        clock: Clock,
        topologies: Sequence[Topology],
        placement: Placement,
        meeting: Meeting | None = None,
    ) -> None:
        self.inner = inner
        self.meeting = meeting
        self.clock = clock
        self.topologies = tuple(topologies)
        self.placement = placement
        self._sums = PlannedSums(self.topologies, placement)

    @property
    def topology(self) -> Topology:
        """The topology of the first lane."""
        return self.topologies[0]

    @property
    def lanes(self) -> int:
        """How many clients there are."""
        return self.inner.lanes

    def rows(self, lane: int, part: str) -> int:
        """Return how many rows `lane` has in `part`."""
        return self.inner.rows(lane, part)

    def train(self, lane: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """One lane trains, everybody else waits."""
        losses = self.inner.train(lane, epoch, batches, first)
        self.clock.train({lane: _sizes(batches) if self.meeting is None else self.meeting.pop_steps(lane)})
        return losses

    def train_at_once(self, turns: Mapping[int, Sequence[tuple[int, Sequence[Tensor]]]]) -> dict[int, list[float]]:
        """All lanes train side by side."""
        losses = self.inner.train_at_once(turns)
        taken = {k: [n for _, batches in turn for n in _sizes(batches)] for k, turn in turns.items()}
        self.clock.train(taken if self.meeting is None else {lane: self.meeting.pop_steps(lane) for lane in turns})
        return losses

    def train_together(
        self,
        epoch: int,
        step: int,
        batches: Mapping[int, Tensor],
        scales: Mapping[int, float],
        combine: Combine | None = None,
    ) -> dict[int, float]:
        """All lanes take one step side by side, and the way back waits for the slowest."""
        losses = self.inner.train_together(epoch, step, batches, scales, combine)
        self.clock.together({lane: len(rows) for lane, rows in batches.items()})
        return losses

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Weights travel while everybody waits."""
        self.inner.hand_over(source, target, role, epoch, via)
        stops = [member(role, source), *([] if via is None else [via]), member(role, target)]
        size = weight_bytes(self.topologies[source], role, kept=self.placement.kept)
        for sender, receiver in pairwise(stops):
            self.clock.transfer(sender, receiver, size)
        self.clock.barrier()

    def download(self, lanes: Sequence[int], epoch: int) -> None:
        """The fed server sends to all at once, over one uplink."""
        self.inner.download(lanes, epoch)
        for lane in lanes:
            for role in self.placement.fused:
                self.clock.transfer(FED, member(role, lane), self._size(lane, role))
        if self.placement.secure is not None:
            for _, sender, receiver, size in self._sums.open(lanes):
                self.clock.transfer(sender, receiver, size)
        self.clock.barrier()

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """All send to the fed server at once, over one downlink."""
        self.inner.upload(weights, epoch)
        if self.placement.secure is not None:
            for _, sender, receiver, size in self._sums.close(weights):
                self.clock.transfer(sender, receiver, size)
        else:
            for lane in weights:
                for role in self.placement.fused:
                    self.clock.transfer(member(role, lane), FED, self._size(lane, role))
        self.clock.barrier()

    def branch(self, lanes: Sequence[int]) -> None:
        """Copies within a party take no time."""
        self.inner.branch(lanes)

    def merge(self, weights: Mapping[int, float]) -> None:
        """Averages within a party take no time."""
        self.inner.merge(weights)

    def _size(self, lane: int, role: str) -> int:
        return weight_bytes(self.topologies[lane], role, self.placement.buffers, self.placement.kept)


def _sizes(batches: Sequence[Tensor]) -> list[int]:
    """Return the rows of every step that has any; for a step without, nothing is sent and nothing computed."""
    return [len(rows) for rows in batches if len(rows)]


def clock_of(prepared: Prepared, speeds: Speeds) -> Clock:
    """Return a clock at zero for the parties of `prepared`."""
    shape_of_topology: dict[int, StepShape] = {}
    shapes = {}
    for lane, (topology, facts) in enumerate(zip(prepared.topologies, prepared.facts, strict=True)):
        if id(topology) not in shape_of_topology:
            labels = labels_of(topology, prepared.data.clients[lane].train).values()
            size = max((y.element_size() * y[0].numel() for y in labels), default=0)
            shape_of_topology[id(topology)] = step_shape(topology, facts, segment_flops(topology, facts), size)
        shapes[lane] = shape_of_topology[id(topology)]
    others = [FED] if prepared.placement.fused or prepared.placement.meeting else []
    return Clock(shapes, speeds, party_names(prepared.topology, len(prepared.topologies)), others)
