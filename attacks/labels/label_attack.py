"""The base of attacks that predict labels from the gradients of a training step, and their required hints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from splitfed.attacks.base import Attack, Needs, Phase, Target
from splitfed.attacks.labels.cut_gradients import check_classes


@dataclass(frozen=True)
class LabelAttack(Attack):
    """Base of attacks that predict the labels of rows from the gradients returned in a training step.

    A subclass that needs more than the gradients redefines `requires`.
    """

    target: ClassVar[Target] = Target.LABELS
    phase: ClassVar[Phase] = Phase.STEP
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.GRADIENTS})


def known_of_each(attack: str, classes: int | None, hints: int) -> dict[int, int]:
    """Return the required number of known victims of each class: class -> `hints`, empty for 0.

    `attack`: name in the error. Raises `InvalidInput` for labels that are not classes.
    """
    return dict.fromkeys(range(check_classes(attack, classes)), hints) if hints else {}
