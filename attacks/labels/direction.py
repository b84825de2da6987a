"""Direction: scores a victim by the cosine of its gradient with those of known positive examples.

Paper: Li, Sun, Yang, Gao, Zhang, Xie, Smith, Wang, "Label leakage and protection in two-party split learning", ICLR
2022 (the "hint" attack). A victim's score is the greatest cosine between its gradient and those of the hints, victims
known to be positive; with one hint that is the paper's score, and the maximum over several is ours. A zero gradient has
cosine 0 to all others. Hints are not scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.attacks.base import DefenseEffect, Knowledge, Progress
from splitfed.attacks.labels.label_attack import LabelAttack, check_two_classes, gradient_rows
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.messages import View


@dataclass(frozen=True)
class Direction(LabelAttack):
    """Predicts two classes by the direction of a row's gradient, compared with those of known positives.

    `hints`: number of known positives among the victims (the paper has 1; 3 and 5 are usual too).
    """

    adapts_to = frozenset({DefenseEffect.TASK_WEIGHT})

    hints: int = field(default=1, metadata=require_count("direction hints", low=1))

    def asks(self, classes: int | None) -> dict[int, int]:
        """Return the number of known positives required: 1 -> `hints`.

        Raises `InvalidInput` unless there are two classes.
        """
        check_two_classes("direction", classes)
        return {1: self.hints}

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the greatest cosine to a hint: (victims,) in [-1, 1]."""
        check_two_classes("direction", knowledge.classes)
        if 1 not in knowledge.hints or len(knowledge.hints[1]) == 0:
            raise InvalidInput("direction needs known positives among the victims; none are known")
        units = functional.normalize(gradient_rows(view, knowledge.device), dim=1, eps=1e-30)
        return (units @ units[knowledge.hints[1].to(units.device)].T).max(1).values
