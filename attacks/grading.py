"""Scores a guess by what it is a guess of; the only place where an attack's result meets the truth."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from splitfed.attacks.base import Target
from splitfed.attacks.label_metrics import grade_labels
from splitfed.attacks.metrics import Grade, grade


class Rows(Protocol):
    """What a grader needs of a data set."""

    @property
    def x(self) -> Tensor:
        """The rows."""
        ...

    @property
    def y(self) -> Tensor:
        """Their labels."""
        ...

    @property
    def value_range(self) -> tuple[float, float] | None:
        """The least and the greatest value of x."""
        ...


def grade_of(
    target: Target, guess: Tensor, victims: Rows, auxiliary: Rows, generator: torch.Generator
) -> tuple[Tensor, Grade]:
    """Return the truth that `guess` is about, and the guess's grade beside its baselines."""
    if target is Target.LABELS:
        return victims.y, grade_labels(victims.y, guess, auxiliary.y, generator)
    return victims.x, grade(victims.x, guess, victims.value_range, auxiliary.x, generator)
