"""Co-training: two logistic regressions, on own features and on gradients, that label rows for each other.

Paper: after Blum, Mitchell, "Combining labeled and unlabeled data with co-training", COLT 1998, whose two views of a
row label rows for each other; here the exchanged labels are probabilities of all rows at once, and the prediction is
the sum of both views' log odds. The use of gradients as a view, and the features computed from them, are ours.

The first view is the adversary's own features (`own_features`), fitted to the known labels. Its probabilities, kept
within `CLAMPED` of certainty, are the labels of the second: the `components` leading principal components of the
gradients at the cut and of their directions, the log of their length and its square. The sum of both gives the next
labels of all unknown rows; this is repeated for `rounds`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import DefenseEffect, Knowledge, Needs, Progress
from splitfed.attacks.labels.label_attack import LabelAttack, gradient_rows
from splitfed.attacks.labels.logistic_regression import LogisticRegression, fit_logistic
from splitfed.attacks.labels.own_data import own_rows, victims_of
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.messages import View

CLAMPED = 0.02
"""Minimum distance of a soft label from 0 and 1."""
FLOOR = 1e-3
"""Length, relative to the median length of gradients, below which a gradient has no direction."""
ROUNDING = 1e-6
"""Size of a principal component or deviation, relative to the first, below which it counts as rounding."""


@dataclass(frozen=True)
class CoTraining(LabelAttack):
    """Predicts classes by the sum of two regressions, on own features and on gradients.

    `hints`: known victims of each class; `rounds`: of exchanged labels; `components`: number of principal components of
    the gradients, and of their directions.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.GRADIENTS, Needs.OWN_INPUTS})
    uses: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY_LABELS})
    adapts_to = frozenset({DefenseEffect.TASK_WEIGHT, DefenseEffect.GRADIENT, DefenseEffect.RELEASE})

    hints: int = field(default=6, metadata=require_count("co_training hints"))
    rounds: int = field(default=6, metadata=require_count("co_training rounds", low=1))
    components: int = field(default=8, metadata=require_count("co_training components", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the sum of both views' log probabilities of each class: (victims, classes)."""
        return self.fit(view, knowledge).log_posterior(gradient_rows(view, knowledge.device))

    def fit(self, view: View, knowledge: Knowledge) -> FittedViews:
        """Return both views, fitted to the known labels and the gradients in `view`; raises as `run` does."""
        rows, labels, known = own_rows("co_training", view, knowledge)
        received, victims = gradient_rows(view, knowledge.device), victims_of(knowledge)
        if len(received) != victims:
            raise InvalidInput(
                f"co_training needs one gradient for every row; {view.party} has {len(received)} for {victims} rows"
            )
        reduction = reduce_gradients(received, self.components)
        gradients = reduction(received)
        own = scores = fit_logistic(rows[known], labels)(rows[:victims])
        told = known < victims
        for _ in range(self.rounds):
            soft = scores.softmax(1).clamp(CLAMPED, 1 - CLAMPED)
            soft[known[told]] = labels[told]
            second = fit_logistic(gradients, soft / soft.sum(1, keepdim=True))
            scores = own + second(gradients)
        return FittedViews(own, reduction, second)


@dataclass(frozen=True)
class FittedViews:
    """The first view's log probabilities of every victim, (victims, classes), and the fitted second view."""

    own: Tensor
    reduction: GradientNumbers
    second: LogisticRegression

    def log_posterior(self, gradients: Tensor) -> Tensor:
        """Return the sum of both views' log probabilities for `gradients` (victims, numbers): (victims, classes)."""
        return self.own + self.second(self.reduction(gradients))


@dataclass(frozen=True)
class GradientNumbers:
    """Maps gradients to a few standardised features.

    `floor`: lower bound of a gradient's length; `shift` and `scale`: (features,), mean and deviation of the features.
    `means` and `axes`: (numbers,) and (numbers, components), of gradients and of their directions.
    """

    floor: float
    means: tuple[Tensor, Tensor]
    axes: tuple[Tensor, Tensor]
    shift: Tensor | float = 0.0
    scale: Tensor | float = 1.0

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the features of gradients `rows` (n, numbers): (n, 2 components + 2) at most; float64."""
        kinds = _kinds(rows.double(), self.floor)
        along = [(rows - mean) @ axes for rows, mean, axes in zip(kinds[:2], self.means, self.axes, strict=True)]
        return (torch.cat([*along, kinds[2], kinds[2].square()], 1) - self.shift) / self.scale


def reduce_gradients(gradients: Tensor, components: int) -> GradientNumbers:
    """Return the map of `gradients` (n, numbers) to features of mean 0 and deviation 1 over these rows."""
    rows = gradients.double()
    lengths = rows.norm(dim=1)
    floor = max(FLOOR * float(lengths.median()), torch.finfo(torch.float64).tiny)
    first, second, _ = _kinds(rows, floor)
    means = first.mean(0), second.mean(0)
    plain = GradientNumbers(floor, means, (_axes(first - means[0], components), _axes(second - means[1], components)))
    made = plain(rows)
    deviation = made.std(0, correction=0)
    return replace(plain, shift=made.mean(0), scale=torch.where(deviation > ROUNDING, deviation, 1.0))


def _kinds(rows: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in units of the floor, their directions, and the log of their lengths, (n, 1)."""
    lengths = rows.norm(dim=1, keepdim=True).clamp_min(floor)
    return rows / floor, rows / lengths, (lengths / floor).log()


def _axes(centered: Tensor, components: int) -> Tensor:
    """Return the leading principal components of `centered` (n, numbers) that exceed rounding: (numbers, k)."""
    _, sizes, axes = torch.linalg.svd(centered, full_matrices=False)
    kept = min(components, int((sizes > ROUNDING * sizes[:1]).sum()))
    found: Tensor = axes[:kept].T
    return found
