"""The base of the attacks on labels that read the gradients of a training step, and whom they must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from splitfed.attacks.base import Attack, Needs, Phase, Target
from splitfed.attacks.labels.cut_gradients import check_classes


@dataclass(frozen=True)
class LabelAttack(Attack):
    """Base of attacks that predict the labels of rows from the gradients that came back in a training step.

    A subclass that needs more than the gradients sets `requires` anew.
    """

    target: ClassVar[Target] = Target.LABELS
    phase: ClassVar[Phase] = Phase.STEP
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.GRADIENTS})


def known_of_each(attack: str, classes: int | None, hints: int) -> dict[int, int]:
    """Return how many victims of each class must be known: class -> `hints`, empty for 0; refuses labels that are none.

    `attack`: its name, for the error.
    """
    return dict.fromkeys(range(check_classes(attack, classes)), hints) if hints else {}
