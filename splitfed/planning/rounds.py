"""A round of a federated method around that of the schedule: who is asked before, how each trains, who has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from splitfed.aggregation.running_mean import shares
from splitfed.core.executor import Combine
from splitfed.core.topology import Topology
from splitfed.engines.base import Trainer
from splitfed.federated.base import Learner, Method
from splitfed.schedules.base import Round, Schedule, Training
from splitfed.schedules.sampling import Sampled, list_clients


def query(
    method: Method,
    learners: Sequence[Learner],
    schedule: Schedule,
    trainer: Trainer,
    training: Training,
    number: int,
    state: dict[str, Any],
) -> None:
    """Let `method` tell the clients that `schedule` will ask in round `number` what they need."""
    participants: Sequence[int] = range(trainer.lanes)
    if isinstance(schedule, Sampled):
        participants = list_clients(schedule.turns(trainer, training, number))
    method.query([learners[lane] for lane in participants], number, state)


def aggregate(method: Method, learners: Sequence[Learner], done: Round, number: int, state: dict[str, Any]) -> Round:
    """Let `method` take from the clients that finished the round `done`; nothing where there were too few.

    Return the round, not fused where the method's quorum was missed.
    """
    finished = [learners[lane] for lane in done.clients if lane not in done.dropped]
    settings = method.traits(learners[0].topology).aggregation
    if settings is not None and len(finished) < settings.required(len(done.clients)):
        return replace(done, fused=False)
    if finished and done.fused:
        method.aggregate(finished, shares({one.lane: float(one.rows()) for one in finished}), number, state)
    return done


class Guided:
    """Passes everything on to `inner`, but a client's own training, which `method` leads."""

    def __init__(self, inner: Trainer, method: Method, learners: Sequence[Learner]) -> None:
        self.inner = inner
        self.method = method
        self.learners = tuple(learners)

    @property
    def topology(self) -> Topology:
        """The topology of the first lane."""
        return self.inner.topology

    @property
    def lanes(self) -> int:
        """How many clients there are."""
        return self.inner.lanes

    def rows(self, lane: int, part: str) -> int:
        """Return how many rows `lane` has in `part`."""
        return self.inner.rows(lane, part)

    def train(self, lane: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Train one lane as the method does."""
        return self.method.train(self.learners[lane], epoch, batches, first)

    def train_at_once(self, turns: Mapping[int, Sequence[tuple[int, Sequence[Tensor]]]]) -> dict[int, list[float]]:
        """Train several lanes as the method does, one after another."""
        return {k: [x for epoch, steps in turn for x in self.train(k, epoch, steps)] for k, turn in turns.items()}

    def train_together(
        self,
        epoch: int,
        step: int,
        batches: Mapping[int, Tensor],
        scales: Mapping[int, float],
        combine: Combine | None = None,
    ) -> dict[int, float]:
        """Take a common step: it belongs to no client alone, and no method leads it."""
        return self.inner.train_together(epoch, step, batches, scales, combine)

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Pass it on."""
        self.inner.hand_over(source, target, role, epoch, via)

    def download(self, lanes: Sequence[int], epoch: int) -> None:
        """Pass it on."""
        self.inner.download(lanes, epoch)

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Pass it on."""
        self.inner.upload(weights, epoch)

    def branch(self, lanes: Sequence[int]) -> None:
        """Pass it on."""
        self.inner.branch(lanes)

    def merge(self, weights: Mapping[int, float]) -> None:
        """Pass it on."""
        self.inner.merge(weights)
