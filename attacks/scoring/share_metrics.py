"""Scores for predicted class shares: their distance from the true ones, and the detection of present classes."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.attacks.scoring.label_metrics import auc
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.core.errors import InvalidInput
from splitfed.stats.intervals import Interval


def score_shares(labels: Tensor, prediction: Tensor, prior: Tensor) -> tuple[Tensor, Scores]:
    """Return the shares (classes,) of each class among `labels` (rows,) int64, and scores of `prediction` (classes,).

    Predictors: "attack", and the baselines "prior", the shares among the labels `prior` (m,) that an attacker may know,
    and "uniform". Metrics: "total_variation", half the sum of absolute differences, in [0, 1], 0 for the true shares;
    if some classes are missing also "auc", the probability that a present class has a greater predicted share than a
    missing one, ties counting half, which is .5 for the baselines. A single client has no intervals.
    """
    if (
        prediction.dim() != 1
        or not bool(torch.isfinite(prediction).all())
        or bool((prediction < 0).any())
        or float(prediction.sum()) <= 0
    ):
        raise InvalidInput(
            "prediction has no valid shares; expected (classes,) finite numbers of at least 0, not all 0"
        )
    classes = len(prediction)
    if labels.is_floating_point() or int(labels.max()) >= classes:
        raise InvalidInput(f"prediction has shares of {classes} classes, which the client's labels are not among")
    truth = _shares(labels, classes)
    shares_by_guesser = {
        "attack": prediction.double().cpu() / float(prediction.sum()),
        "uniform": torch.full_like(truth, 1 / classes),
    }
    if len(prior):
        shares_by_guesser["prior"] = _shares(prior, classes)
    held = truth > 0
    scores: Scores = {}
    for name, shares in shares_by_guesser.items():
        scores[name] = {"total_variation": _without_bounds(float((shares - truth).abs().sum() / 2), classes)}
        if 0 < int(held.sum()) < classes:
            scores[name]["auc"] = _without_bounds(auc(shares, held) if name == "attack" else 0.5, classes)
    return truth, scores


def _shares(labels: Tensor, classes: int) -> Tensor:
    counts = torch.bincount(labels.view(-1).long().cpu(), minlength=classes)[:classes].double()
    return counts / counts.sum()


def _without_bounds(value: float, n: int) -> Interval:
    return Interval(value, float("nan"), float("nan"), n)
