"""Agreement of predicted labels: selects, among equally accurate predictions, the one most similar to the others.

Source: the medoid, Kaufman, Rousseeuw, "Clustering by means of medoids", Statistical data analysis based on the L1 norm
and related methods, 1987; for two classes by rank correlation, Spearman, "The proof and measurement of association
between two things", American Journal of Psychology 15, 1904. Predictions that are right for different reasons agree
with one another; predictions that fit a few known victims by chance do not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy.stats import rankdata
from torch import Tensor


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
