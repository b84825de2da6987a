"""Victims whose labels an adversary knows, by which it judges attacks on the labels of all others.

Source: cross-validation, Stone, "Cross-validatory choice and assessment of statistical predictions", Journal of the
Royal Statistical Society B 36, 1974, on the known rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.scoring.label_metrics import auc

FOLDS = 2
ROUNDING = 1e-9
"""Errors and shares of known victims that differ by no more are equal."""


@dataclass(frozen=True)
class KnownVictims:
    """Victims whose classes the adversary knows.

    `hints`: class -> positions of the victims (count,) known to belong to it; `classes`: how many there are.

    Two known victims of every class at least can judge: one to learn from, and one that was not learnt from.
    """

    hints: Mapping[int, Tensor]
    classes: int

    @property
    def judges(self) -> bool:
        """Whether there are enough of them to judge by."""
        return self.least >= FOLDS

    @property
    def least(self) -> int:
        """The number of known victims of the class that has the fewest."""
        return min(len(self.hints.get(number, ())) for number in range(self.classes))

    @property
    def metric(self) -> str:
        """By what is judged: "auc" for two classes, else "accuracy"."""
        return "auc" if self.classes == 2 else "accuracy"

    def extended(self, labels: Tensor, victims: int) -> KnownVictims:
        """Return these and further known rows, with `labels` (count,), that stand behind the `victims`."""
        hints = {}
        for number in range(self.classes):
            further = (labels == number).nonzero()[:, 0] + victims
            hints[number] = torch.cat([self.hints.get(number, further[:0]).cpu(), further])
        return KnownVictims(hints, self.classes)

    def folds(self) -> Iterator[tuple[dict[int, Tensor], Tensor]]:
        """Yield the hints that are left in each fold, class -> positions, and the positions (count,) held out of it."""
        for fold in range(FOLDS):
            held = torch.cat([rows[fold::FOLDS] for rows in self.hints.values()])
            yield {c: rows[~torch.isin(rows, held)] for c, rows in self.hints.items()}, held

    def cross_predict(self, predict: Callable[[dict[int, Tensor]], Tensor]) -> Tensor:
        """Return what `predict` makes of hints: for each known victim, of those of the fold that it is held out of."""
        scores = torch.empty(0)
        for hints, held in self.folds():
            found = predict(hints)
            scores = scores if len(scores) else found.clone()
            scores[held] = found[held]
        return scores

    def error(self, scores: Tensor) -> float:
        """Return 1 - AUC, or 1 - accuracy, of `scores` (victims, classes), or (victims,) for two, on the known ones."""
        labels, rows = self.labels_and_rows()
        found = scores.detach().cpu()[rows]
        if self.metric == "auc":
            return 1 - auc(found if found.dim() == 1 else found[:, 1] - found[:, 0], labels == 1)
        return 1 - float((found.argmax(1) == labels).double().mean())

    def deviation(self, error: float) -> float:
        """Return the standard deviation of an `error` that these victims show, by chance in which of them are known.

        Of an accuracy the binomial one; of an AUC that of Hanley, McNeil, "The meaning and use of the area under a
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
        """Return above what `scores` (victims,), of two classes, say class 1: of most right answers in both classes.

        It lies in the middle between two known victims; of several that are equal it is the median, the upper of two.
        """
        labels, rows = self.labels_and_rows()
        found, order = scores.detach().double().cpu()[rows].sort(stable=True)
        cuts = (found[1:] + found[:-1])[found[1:] > found[:-1]] / 2
        if len(cuts) == 0:
            return float(found[0])
        above = found > cuts[:, None]
        positive = labels[order] == 1
        right = above[:, positive].double().mean(1) + (~above[:, ~positive]).double().mean(1)
        best = cuts[right >= right.max() - ROUNDING]
        return float(best[len(best) // 2])

    def labels_and_rows(self) -> tuple[Tensor, Tensor]:
        """Return the labels of the known victims (count,), and their positions (count,)."""
        labels = [torch.full((len(rows),), number, dtype=torch.int64) for number, rows in self.hints.items()]
        return torch.cat(labels), torch.cat([rows.cpu() for rows in self.hints.values()])
