"""A trainer that computes nothing: it counts the messages that a real one would carry, from shapes alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from splitfed.accounting.bytes import value_bytes, weight_bytes
from splitfed.defense import Defense, packed_bytes
from splitfed.engines.base import FED
from splitfed.executor import Combine
from splitfed.graph import Edge, Topology, member
from splitfed.preparation import Prepared, labels_of
from splitfed.probe import Facts
from splitfed.traffic import Traffic


class Flowing(NamedTuple):
    """What one step sends in one message: from role to role, and how many bytes for so many rows."""

    kind: str
    sender: str
    receiver: str
    size: Callable[[int], int]


class Dry:
    """Plays a schedule of `prepared`; `traffic` holds what a run would count, exactly, and `steps` the rows of each."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.topology = prepared.topology
        self.traffic = Traffic()
        self.steps: dict[int, list[int]] = {lane: [] for lane in range(self.lanes)}
        self._own = set(self.topology.data_roles)
        self._flows: dict[int, list[Flowing]] = {}

    @property
    def lanes(self) -> int:
        """How many clients there are."""
        return len(self.prepared.topologies)

    def rows(self, lane: int, part: str) -> int:
        """Return how many rows `lane` has in `part`."""
        return len(getattr(self.prepared.data.clients[lane], part))

    def train(self, lane: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Count the messages of these steps."""
        for rows in batches:
            self._step(lane, len(rows))
        return [0.0] * len(batches)

    def train_at_once(self, turns: Mapping[int, Sequence[tuple[int, Sequence[Tensor]]]]) -> dict[int, list[float]]:
        """Count the messages of all turns."""
        return {k: [x for epoch, steps in turn for x in self.train(k, epoch, steps)] for k, turn in turns.items()}

    def train_together(
        self,
        epoch: int,
        step: int,
        batches: Mapping[int, Tensor],
        scales: Mapping[int, float],
        combine: Combine | None = None,
    ) -> dict[int, float]:
        """Count the messages of one step of every lane."""
        return {lane: self.train(lane, epoch, [rows])[0] for lane, rows in batches.items()}

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Count the weights handed over."""
        stops = [member(role, source), *([] if via is None else [via]), member(role, target)]
        for sender, receiver in pairwise(stops):
            self._count("weights", sender, receiver, weight_bytes(self.prepared.topologies[source], role))

    def download(self, lanes: Sequence[int], epoch: int) -> None:
        """Count what the fed server sends."""
        for role in self.prepared.placement.fused:
            for lane in lanes:
                self._count("weights", FED, member(role, lane), self._size(lane, role))

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Count what the fed server receives."""
        for role in self.prepared.placement.fused:
            for lane in weights:
                self._count("weights", member(role, lane), FED, self._size(lane, role))

    def branch(self, lanes: Sequence[int]) -> None:
        """Nothing crosses."""

    def merge(self, weights: Mapping[int, float]) -> None:
        """Nothing crosses."""

    def _size(self, lane: int, role: str) -> int:
        return weight_bytes(self.prepared.topologies[lane], role, self.prepared.placement.buffers)

    def _step(self, lane: int, rows: int) -> None:
        self.steps[lane].append(rows)
        topology = self.prepared.topologies[lane]
        if id(topology) not in self._flows:
            labels = labels_of(topology, self.prepared.data.clients[lane].train)
            self._flows[id(topology)] = flows_of(topology, self.prepared.facts[lane], labels, self.prepared.defenses)
        for flow in self._flows[id(topology)]:
            ends = [member(role, lane) if role in self._own else role for role in (flow.sender, flow.receiver)]
            self._count(flow.kind, ends[0], ends[1], flow.size(rows))

    def _count(self, kind: str, sender: str, receiver: str, nbytes: int) -> None:
        self.traffic.add("train", kind, sender, receiver, nbytes)


def flows_of(
    topology: Topology, facts: Facts, labels: Mapping[str, Tensor], defenses: Sequence[Defense] = ()
) -> list[Flowing]:
    """Return every message of one training step of `topology`; `labels`: head -> labels, for their size."""
    found = []
    guarded = [defense.edges(topology) for defense in defenses]
    for edge in topology.crossings:
        source, target = topology.role_of(edge.source), topology.role_of(edge.target)
        guards = [defense for defense, edges in zip(defenses, guarded, strict=True) if edge.name in edges]
        found.append(Flowing("activation", source, target, partial(_size, facts, edge, "activation", guards)))
        if edge.name not in topology.forward_only:
            found.append(Flowing("gradient", target, source, partial(_size, facts, edge, "gradient", guards)))
    for head in topology.heads:
        y = labels[head.value]
        size = partial(operator.mul, y.element_size() * y[0].numel())
        found += [Flowing("label", sender, receiver, size) for sender, receiver in pairwise(head.path)]
    return found


def _size(facts: Facts, edge: Edge, kind: str, guards: Sequence[Defense], rows: int) -> int:
    total = 0
    for value in edge.values:
        packed = packed_bytes(guards, kind, rows, facts.shapes[value], facts.dtypes[value])
        total += value_bytes(facts, value) * rows if packed is None else packed
    return total
