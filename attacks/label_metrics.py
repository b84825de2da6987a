"""Scores for guessed labels: accuracy and, for two classes, the area under the ROC curve ("leak AUC").

Paper: Li, Sun, Yang, et al., "Label leakage and protection in two-party split learning", ICLR 2022, section 3 (leak
AUC).

The AUC is that of the scores as they are: nobody but the truth could say which way to flip them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.attacks.metrics import Grade
from splitfed.errors import InvalidInput
from splitfed.intervals import Interval, bootstrap_interval


def grade_labels(truth: Tensor, guess: Tensor, prior: Tensor, generator: torch.Generator) -> Grade:
    """Grade `guess`, scores (n, classes) or (n,) for two classes, of the labels `truth`, (n,) int64.

    Guessers: "guess", and the baselines "majority", which says the most frequent class of `prior` (m,), the labels an
    attacker may know of, and "random_pairing", which says another victim's label. Metrics: "accuracy" with a bootstrap
    interval over victims; for two classes "auc" in [0, 1] as well, with .5 for the baselines.
    """
    if truth.dim() != 1 or truth.is_floating_point():
        raise InvalidInput(f"labels have shape {tuple(truth.shape)} and type {truth.dtype}; expected one class a row")
    if len(guess) != len(truth) or guess.dim() not in (1, 2):
        raise InvalidInput(f"guess has shape {tuple(guess.shape)}; expected scores for {len(truth)} victims")
    scores = guess.detach().double().cpu()
    said = (scores > 0).long() if scores.dim() == 1 else scores.argmax(1)
    grades: Grade = {"guess": {"accuracy": _share(said == truth, generator)}}
    if len(prior):
        most = prior.long().mode().values
        grades["majority"] = {"accuracy": _share(truth == most, generator)}
    if len(truth) > 1:
        order = torch.randperm(len(truth), generator=generator, device=generator.device).cpu()
        grades["random_pairing"] = {"accuracy": _share(truth[order] == truth[order.roll(1)], generator)}
    if scores.dim() == 1 or scores.shape[1] == 2:
        single = scores if scores.dim() == 1 else scores[:, 1] - scores[:, 0]
        if 0 < int(truth.sum()) < len(truth):
            grades["guess"]["auc"] = auc_interval(single, truth == 1, generator)
            for name in ("majority", "random_pairing"):
                if name in grades:
                    grades[name]["auc"] = Interval(0.5, 0.5, 0.5, len(truth))
    return grades


def auc(scores: Tensor, positive: Tensor) -> float:
    """Return the chance that a positive scores higher than a negative, ties counting half, in [0, 1].

    scores: (n,); positive: (n,) bool with at least one of each.
    """
    if not 0 < int(positive.sum()) < len(positive):
        raise InvalidInput("an AUC needs at least one positive and one negative")
    order = torch.unique(scores.double(), return_inverse=True)[1]
    above = torch.bincount(order[~positive], minlength=int(order.max()) + 1).double()
    below = above.cumsum(0) - above
    wins = below[order[positive]] + above[order[positive]] / 2
    return float(wins.mean() / (~positive).sum())


def auc_interval(scores: Tensor, positive: Tensor, generator: torch.Generator, resamples: int = 500) -> Interval:
    """Return `auc` with its 95 % percentile bootstrap interval over victims, each class resampled by itself."""
    positives, negatives = scores[positive], scores[~positive]
    found = []
    for _ in range(resamples):
        one, other = _resampled(positives, generator), _resampled(negatives, generator)
        marks = torch.arange(len(one) + len(other)) < len(one)
        found.append(auc(torch.cat([one, other]), marks))
    tails = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.tensor(found, dtype=torch.float64).quantile(tails).tolist()
    return Interval(auc(scores, positive), low, high, len(scores))


def _resampled(values: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(len(values), (len(values),), generator=generator, device=generator.device)
    return values[drawn.to(values.device)]


def _share(right: Tensor, generator: torch.Generator) -> Interval:
    return bootstrap_interval(right.double(), generator)
