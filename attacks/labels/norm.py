"""Norm: scores a victim by the length of its gradient, which is larger for positive examples.

Paper: Li, Sun, Yang, Gao, Zhang, Xie, Smith, Wang, "Label leakage and protection in two-party split learning", ICLR
2022. With few positives a model predicts "negative" with confidence, so the gradient of a positive is long. The score
is that length; its orientation is fixed beforehand and never reversed. The paper has scores only; to predict labels the
scores are shifted so that the boundary between their two groups is at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.base import DefenseEffect, Knowledge, Progress
from splitfed.attacks.labels.label_attack import LabelAttack, boundary, check_two_classes, gradient_rows
from splitfed.core.messages import View


@dataclass(frozen=True)
class Norm(LabelAttack):
    """Requires the gradients of single examples at the cut and labels of two classes; has no parameters."""

    adapts_to = frozenset({DefenseEffect.TASK_WEIGHT})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the length of each victim's gradient minus the boundary: (victims,), in units of the gradient."""
        check_two_classes("norm", knowledge.classes)
        lengths: Tensor = gradient_rows(view, knowledge.device).norm(dim=1)
        return lengths - boundary(lengths)
