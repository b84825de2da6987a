"""Distillation: the divergence between two models' class scores, and the local objective that adds it to a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from splitfed.core.messages import Stamp
from splitfed.federated.base import State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) of class scores before the softmax, (batch, classes), with the teacher detached.

    Summed over the classes, averaged over the batch: a scalar.
    """
    told = functional.log_softmax(teacher.detach(), 1)
    return functional.kl_div(functional.log_softmax(student, 1), told, reduction="batchmean", log_target=True)


def accuracy(learner: Learner, value: str, part: str) -> float:
    """Return the accuracy in [0, 1] of the argmax of the class scores `value`, (rows, classes), on `part`."""
    return float((learner.compute(value, part).argmax(1) == learner.labels(value, part).view(-1)).double().mean())


def score_second(learner: Learner, name: str, head: int, part: str, state: State) -> dict[str, float]:
    """Return the accuracy, under `name`, of head number `head` with the weights that the server keeps under that name.

    Empty before the server has such weights.
    """
    if not state[name]:
        return {}
    with learner.lend(state[name]):
        return {name: accuracy(learner, learner.topology.heads[head].value, part)}


@dataclass(frozen=True)
class TeachingPair:
    """One direction of mutual distillation: `segment` makes the scores `student`, which are to match `teacher`'s.

    `weight` multiplies the divergence; both scores are available at the same party.
    """

    segment: str
    student: str
    teacher: str
    weight: float


@dataclass(frozen=True)
class MutualDistillation(NoObjective):
    """Adds the weighted divergence of every pair to the loss of its student; keeps no state."""

    pairs: tuple[TeachingPair, ...]

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted divergences, by the student's segment."""
        return {one.segment: one.weight * divergence(made[one.student], made[one.teacher]) for one in self.pairs}
