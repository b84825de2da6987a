"""Losses and class scores of the task, for training attacks, whatever the model's last layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.attacks.training_time.attack_site import AttackSite
from splitfed.core.errors import InvalidInput


def check_classes(who: str, site: AttackSite) -> None:
    """Raise `InvalidInput` for a task without classes."""
    if site.knowledge.classes is None:
        raise InvalidInput(f"{who} learns from classes; the task of this run has none")


def loss_of(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of `scores` (rows, classes), or of one logit a row, for labels y (rows,)."""
    if scores.dim() == 1 or scores.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(scores.flatten(), y.to(scores))
    return functional.cross_entropy(scores, y.long())


def class_scores(scores: Tensor) -> Tensor:
    """Return scores (rows, classes), also for outputs of one logit a row."""
    if scores.dim() == 1 or scores.shape[1] == 1:
        return torch.stack([torch.zeros_like(scores.flatten()), scores.flatten()], 1)
    return scores
