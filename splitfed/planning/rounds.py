"""A round of a federated method around that of the schedule: query, training, and aggregation.

A trainer that wraps another one forwards all calls except for those that it overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from splitfed.aggregation.running_mean import shares
from splitfed.core.executor import Combine
from splitfed.engines.base import ReplicaBatches, Scales, Trainer
from splitfed.federated.base import Method
from splitfed.federated.groups import federations
from splitfed.federated.learner import Learner
from splitfed.schedules.base import Round, Schedule, Training
from splitfed.schedules.sampling_and_dropout import Sampled, list_clients


def query(
    method: Method,
    learners: Sequence[Learner],
    schedule: Schedule,
    trainer: Trainer,
    training: Training,
    number: int,
    state: dict[str, Any],
) -> None:
    """Let `method` send messages to the clients that `schedule` will train in round `number`."""
    participants: Sequence[int] = range(trainer.replicas)
    if isinstance(schedule, Sampled):
        participants = list_clients(schedule.turns(trainer, training, number))
    with _training_copies("query", method, trainer, schedule, participants):
        for asked, known in federations(method, [learners[replica] for replica in participants], state):
            method.query(asked, number, known)


def aggregate(
    method: Method,
    learners: Sequence[Learner],
    schedule: Schedule,
    trainer: Trainer,
    done: Round,
    number: int,
    state: dict[str, Any],
) -> Round:
    """Let `method` aggregate the uploads of the clients that finished round `done`; return the round.

    Below the quorum, or the number that its secure sum needs, nothing is aggregated, and `averaged` of the returned
    round is False.
    """
    finished = [learners[replica] for replica in done.clients if replica not in done.dropped]
    traits, asked = method.traits(learners[0].topology), len(done.clients)
    needed = 0 if traits.aggregation is None else traits.aggregation.required(asked)
    # A method without uploads after the round has computed its sum before it.
    if traits.secure is not None and type(method).aggregate is not Method.aggregate:
        needed = max(needed, traits.secure.required_members(asked))
    if len(finished) < needed:
        return replace(done, averaged=False)
    if finished and done.averaged:
        parts = shares({one.replica: float(one.rows()) for one in finished})
        with _training_copies("aggregate", method, trainer, schedule, list(parts)):
            for members, known in federations(method, finished, state):
                method.aggregate(members, parts, number, known)
    return done


@contextmanager
def _training_copies(
    where: str, method: Method, trainer: Trainer, schedule: Schedule, replicas: Sequence[int]
) -> Iterator[None]:
    """Let copies of shared segments begin as the merged ones, and merge them after a block in which the method trains.

    Every client counts as in the merges of the schedule.
    """
    if method.traits(trainer.topology).trains_between_rounds != where:
        yield
        return
    trainer.branch(replicas)
    yield
    counted = getattr(schedule, "by_examples", True)
    trainer.merge({one: float(trainer.rows(one, "train")) if counted else 1.0 for one in replicas})


class ForwardingTrainer(Trainer):
    """Forwards everything to `inner`; several replicas are trained by `train`, one after another."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner
        self.topology, self.replicas = inner.topology, inner.replicas

    def rows(self, replica: int, part: str) -> int:
        """Forward to `inner`."""
        return self.inner.rows(replica, part)

    def train(self, replica: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Forward to `inner`."""
        return self.inner.train(replica, epoch, batches, first)

    def train_together(
        self, epoch: int, step: int, batches: ReplicaBatches, scales: Scales, combine: Combine | None = None
    ) -> dict[int, float]:
        """Forward to `inner`."""
        return self.inner.train_together(epoch, step, batches, scales, combine)

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Forward to `inner`."""
        self.inner.hand_over(source, target, role, epoch, via)

    def download(self, replicas: Sequence[int], epoch: int) -> None:
        """Forward to `inner`."""
        self.inner.download(replicas, epoch)

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Forward to `inner`."""
        self.inner.upload(weights, epoch)

    def branch(self, replicas: Sequence[int]) -> None:
        """Forward to `inner`."""
        self.inner.branch(replicas)

    def merge(self, weights: Mapping[int, float]) -> None:
        """Forward to `inner`."""
        self.inner.merge(weights)


class MethodTrainer(ForwardingTrainer):
    """Forwards everything to `inner` except for a client's own training, which `method` controls."""

    def __init__(self, inner: Trainer, method: Method, learners: Sequence[Learner]) -> None:
        super().__init__(inner)
        self.method, self.learners = method, tuple(learners)

    def train(self, replica: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Train one replica by the method's `train`."""
        return self.method.train(self.learners[replica], epoch, batches, first)
