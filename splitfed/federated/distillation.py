"""What distillation methods share: the divergence of two models' class scores, and its local objective."""

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
    """Return KL(teacher || student), of class scores before the softmax (batch, classes), the teacher's detached.

    Summed over the classes, averaged over the batch: a scalar.
    """
    told = functional.log_softmax(teacher.detach(), 1)
    return functional.kl_div(functional.log_softmax(student, 1), told, reduction="batchmean", log_target=True)


def accuracy(learner: Learner, value: str, part: str) -> float:
    """Return how often the largest of the class scores `value`, (rows, classes), is the label, in `part`."""
    return float((learner.compute(value, part).argmax(1) == learner.labels(value, part).view(-1)).double().mean())


def score_second(learner: Learner, name: str, head: int, part: str, state: State) -> dict[str, float]:
    """Return the accuracy, by its `name`, of head number `head` with the weights that the server keeps under that name.

    Empty before the server has any.
    """
    if not state[name]:
        return {}
    with learner.lend(state[name]):
        return {name: accuracy(learner, learner.topology.heads[head].value, part)}


@dataclass(frozen=True)
class TeachingPair:
    """`segment` makes the class scores `student`, which follow those of `teacher`; both are at the same party."""

    segment: str
    student: str
    teacher: str
    weight: float


@dataclass(frozen=True)
class MutualDistillation(NoObjective):
    """Adds the divergence of every pair to the loss of its student; remembers nothing."""

    pairs: tuple[TeachingPair, ...]

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted divergences, by the student's segment."""
        return {one.segment: one.weight * divergence(made[one.student], made[one.teacher]) for one in self.pairs}
