"""Scores by a classifier of clean rows: the class it predicts for reconstructions, and for representatives of classes.

The classifier learns from undefended auxiliary rows (`splitfed.attacks.scoring.classifier`); its accuracy on the true
rows is the ceiling of every accuracy beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from splitfed.attacks.networks.tokens import frequent_tokens
from splitfed.attacks.scoring.classifier import clean_classifier
from splitfed.attacks.scoring.reconstruction_metrics import Scores, mean_image, random_pairing, score_reconstruction
from splitfed.core.errors import InvalidInput
from splitfed.stats.intervals import Interval, bootstrap_interval


class LabelledRows(Protocol):
    """Rows with class labels and a value range."""

    @property
    def x(self) -> Tensor:
        """The rows, (n, ...)."""

    @property
    def y(self) -> Tensor:
        """The labels, (n,)."""

    @property
    def value_range(self) -> tuple[float, float] | None:
        """Smallest and greatest value of x; None if the rows have no range."""


def accuracies(
    truth: Tensor, prediction: Tensor, labels: Tensor, auxiliary: LabelledRows, generator: torch.Generator
) -> dict[str, dict[str, Interval]]:
    """Return predictor -> "accuracy": the share of rows whose label the clean classifier predicts.

    truth, prediction (n, ...); labels (n,) int64. Predictors: "attack", "truth" (the ceiling), and the baselines
    "mean_image" (for token ids "frequent_token") and, for two rows or more, "random_pairing".
    """
    scores = _classifier(auxiliary, labels)
    real = truth.is_floating_point()
    blind = mean_image(auxiliary.x) if real else frequent_tokens(auxiliary.x)
    rows = {"attack": prediction, "truth": truth, ("mean_image" if real else "frequent_token"): blind.to(truth)}
    rows = {name: x.expand(truth.shape) for name, x in rows.items()}
    if len(truth) > 1:
        rows["random_pairing"] = random_pairing(truth, generator)
    predictions = {name: scores(x).argmax(1).cpu() for name, x in rows.items()}
    return {n: {"accuracy": bootstrap_interval((s == labels).double(), generator)} for n, s in predictions.items()}


def check_scorable(auxiliary: LabelledRows) -> None:
    """Raise `InvalidInput` for fewer than two auxiliary rows, and for labels that are no classes."""
    _whole(auxiliary.y)
    if len(auxiliary.y) < 2:
        raise InvalidInput(f"scoring by a classifier needs two auxiliary rows or more; found {len(auxiliary.y)}")


def score_representatives(
    prediction: Tensor, trained: LabelledRows, auxiliary: LabelledRows, generator: torch.Generator
) -> tuple[Tensor, Scores]:
    """Score representative rows of classes (classes, ...) by the mean row of each class among `trained`.

    Returns these means (present, ...), classes without rows left out, and for every predictor the metrics of
    `score_reconstruction` and "accuracy". Predictors: "attack", the baselines "mean_image" (of the auxiliary rows) and
    "random_pairing" (the mean of another class), and "truth", the means themselves, for accuracy alone.
    """
    present = _whole(trained.y).unique()
    if len(prediction) <= int(present.max()):
        raise InvalidInput(
            f"prediction has {len(prediction)} rows; expected one a class, {int(present.max()) + 1} at least"
        )
    truth = torch.stack([trained.x[trained.y == label].mean(0) for label in present.tolist()])
    predictions = prediction.detach().cpu()[present]
    scores = score_reconstruction(truth, predictions, trained.value_range, auxiliary.x, generator)
    for name, metrics in accuracies(truth, predictions, present, auxiliary, generator).items():
        scores.setdefault(name, {}).update(metrics)
    return truth, scores


def _classifier(auxiliary: LabelledRows, labels: Tensor) -> Callable[[Tensor], Tensor]:
    check_scorable(auxiliary)
    most = max(int(auxiliary.y.max()), int(_whole(labels).max()))
    return clean_classifier(auxiliary, auxiliary.x, auxiliary.y, most + 1)


def _whole(labels: Tensor) -> Tensor:
    if labels.dim() != 1 or labels.is_floating_point():
        raise InvalidInput(
            f"labels have shape {tuple(labels.shape)} and type {labels.dtype}; scoring by a classifier needs classes"
        )
    return labels
