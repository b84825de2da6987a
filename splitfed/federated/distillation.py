"""Distillation: the divergence between two models' class scores, and the local objective that adds it to a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.federated.base import State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective

if TYPE_CHECKING:
    from splitfed.core.topology import Head


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) of class scores, see `class_scores`, with the teacher detached.

    Summed over the classes, averaged over the batch: a scalar.
    """
    told = functional.log_softmax(class_scores(teacher.detach()), 1)
    taught = functional.log_softmax(class_scores(student), 1)
    return functional.kl_div(taught, told, reduction="batchmean", log_target=True)


def class_scores(z: Tensor) -> Tensor:
    """Return the scores before the softmax, (rows, classes), of an output z that may be the one number z of a sigmoid.

    Those are (0, z): z is (rows,) or (rows, 1) then.
    """
    return z if z.dim() > 1 and z.shape[1] > 1 else functional.pad(z.reshape(-1, 1), (1, 0))


def check_class_scores(who: str, head: Head) -> None:
    """Raise `InvalidInput`, naming the method `who`, unless the output at `head` holds the scores of classes."""
    if head.task is None or head.task.name not in ("classification", "binary"):
        raise InvalidInput(f"{who} compares class probabilities; the task here is {head.task and head.task.name!r}")


def accuracy(learner: Learner, value: str, part: str) -> float:
    """Return the accuracy in [0, 1] of the class with the greatest score by `value`, on `part`; see `class_scores`."""
    predicted = class_scores(learner.compute(value, part)).argmax(1)
    return float((predicted == learner.labels(value, part).view(-1)).double().mean())


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
