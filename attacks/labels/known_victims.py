"""Choice among predictions of labels: by victims whose labels the adversary knows, and by agreement where they tie.

Source: cross-validation, Stone, "Cross-validatory choice and assessment of statistical predictions", Journal of the
Royal Statistical Society B 36, 1974, on the known rows; the medoid, Kaufman, Rousseeuw, "Clustering by means of
medoids", Statistical data analysis based on the L1 norm and related methods, 1987; for two classes by rank correlation,
Spearman, "The proof and measurement of association between two things", American Journal of Psychology 15, 1904.

Predictions that are right for different reasons agree with one another; predictions that fit a few known victims by
chance do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from scipy.stats import rankdata
from torch import Tensor

from splitfed.attacks.scoring.label_metrics import auc

FOLDS = 2
ROUNDING = 1e-9
"""Largest difference at which errors, or shares of known victims, count as equal."""


@dataclass(frozen=True)
class KnownVictims:
    """Victims whose classes the adversary knows.

    `hints`: class -> positions of the victims (count,) known to belong to it; `classes`: number of classes. An error
    estimate needs two known victims of every class: one to learn from, and one to test.
    """

    hints: Mapping[int, Tensor]
    classes: int

    @property
    def judges(self) -> bool:
        """Whether every class has enough known victims for an error estimate."""
        return self.least >= FOLDS

    @property
    def least(self) -> int:
        """Smallest number of known victims of any class."""
        return min(len(self.hints.get(number, ())) for number in range(self.classes))

    @property
    def metric(self) -> str:
        """Metric of the error estimate: "auc" for two classes, else "accuracy"."""
        return "auc" if self.classes == 2 else "accuracy"

    def extended(self, labels: Tensor, victims: int) -> KnownVictims:
        """Return these and further known rows, with `labels` (count,), whose positions follow the `victims`."""
        hints = {}
        for number in range(self.classes):
            further = (labels == number).nonzero()[:, 0] + victims
            hints[number] = torch.cat([self.hints.get(number, further[:0]).cpu(), further])
        return KnownVictims(hints, self.classes)

    def folds(self) -> Iterator[tuple[dict[int, Tensor], Tensor]]:
        """Yield for each fold the hints to learn from, class -> positions, and the held-out positions (count,)."""
        for fold in range(FOLDS):
            held = torch.cat([rows[fold::FOLDS] for rows in self.hints.values()])
            yield {c: rows[~torch.isin(rows, held)] for c, rows in self.hints.items()}, held

    def cross_predict(self, predict: Callable[[dict[int, Tensor]], Tensor]) -> Tensor:
        """Return for each known victim the prediction of `predict` from the hints of the fold that holds it out."""
        scores = torch.empty(0)
        for hints, held in self.folds():
            predicted = predict(hints)
            scores = scores if len(scores) else predicted.clone()
            scores[held] = predicted[held]
        return scores

    def error(self, scores: Tensor) -> float:
        """Return 1 - AUC (two classes) or 1 - accuracy of scores on the known victims.

        scores: (victims, classes), or (victims,) for two classes.
        """
        labels, rows = self.labels_and_rows()
        known = scores.detach().cpu()[rows]
        if self.metric == "auc":
            return 1 - auc(known if known.dim() == 1 else known[:, 1] - known[:, 0], labels == 1)
        return 1 - float((known.argmax(1) == labels).double().mean())

    def deviation(self, error: float) -> float:
        """Return the standard deviation of an `error` over random draws of the known victims.

        For an accuracy the binomial one; for an AUC that of Hanley, McNeil, "The meaning and use of the area under a
        receiver operating characteristic (ROC) curve", Radiology 143, 1982.
        """
        right, counts = 1 - error, [len(rows) for rows in self.hints.values()]
        variance = right * error
        if self.metric == "accuracy":
            return math.sqrt(variance / sum(counts))
        negatives, positives = counts
        variance += (positives - 1) * (right / (2 - right) - right**2)
        variance += (negatives - 1) * (2 * right**2 / (1 + right) - right**2)
        return math.sqrt(max(variance, 0.0) / (positives * negatives))

    def threshold(self, scores: Tensor) -> float:
        """Return the threshold on `scores` (victims,) with the greatest balanced accuracy on the known victims.

        Scores above it mean class 1. It lies midway between two known victims; of several equally good ones it is the
        median, the upper of two.
        """
        labels, rows = self.labels_and_rows()
        known, order = scores.detach().double().cpu()[rows].sort(stable=True)
        cuts = (known[1:] + known[:-1])[known[1:] > known[:-1]] / 2
        if len(cuts) == 0:
            return float(known[0])
        above = known > cuts[:, None]
        positive = labels[order] == 1
        right = above[:, positive].double().mean(1) + (~above[:, ~positive]).double().mean(1)
        best = cuts[right >= right.max() - ROUNDING]
        return float(best[len(best) // 2])

    def labels_and_rows(self) -> tuple[Tensor, Tensor]:
        """Return the labels of the known victims (count,), and their positions (count,)."""
        labels = [torch.full((len(rows),), number, dtype=torch.int64) for number, rows in self.hints.items()]
        return torch.cat(labels), torch.cat([rows.cpu() for rows in self.hints.values()])


def most_agreed(predictions: Mapping[str, Tensor]) -> str:
    """Return the name of the prediction with the greatest mean agreement with the others; the first among equals.

    `predictions`: name -> scores (victims, classes), or (victims,) for two classes. The agreement of two predictions is
    the rank correlation of their scores, in [-1, 1], if all have two classes; else the share of victims, in [0, 1],
    with the same predicted class.
    """
    found = [scores.detach().double().cpu() for scores in predictions.values()]
    if all(scores.dim() == 1 or scores.shape[1] == 2 for scores in found):
        ranks = torch.stack([_ranks(scores if scores.dim() == 1 else scores[:, 1] - scores[:, 0]) for scores in found])
        units = torch.nn.functional.normalize(ranks - ranks.mean(1, keepdim=True), dim=1)
        agreement = units @ units.T
    else:
        classes = torch.stack([scores.argmax(1) for scores in found])
        agreement = (classes[:, None] == classes).double().mean(2)
    # Sums of equal agreements in another order differ by rounding, which must not decide.
    return list(predictions)[int(agreement.sum(1).round(decimals=9).argmax())]


def _ranks(scores: Tensor) -> Tensor:
    return torch.from_numpy(rankdata(scores.numpy()))
