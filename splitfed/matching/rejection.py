"""Rejection of clients that fit no expert: a logistic regression on the scores.

Its weights are non-negative, so that a better score never lowers the probability, also far from the fitted data. Scores
are transformed by the inverse hyperbolic sine, linear near zero and logarithmic far away, to limit the influence of
outliers. This part is ours: whether the authors reject clients, and by which classifier, is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


@dataclass(frozen=True)
class Rejection:
    """Probability of a match: the logistic function of `bias` + `weights` . asinh(scores), weights >= 0."""

    weights: tuple[float, ...]
    bias: float

    def probability(self, scores: Tensor) -> Tensor:
        """Return the probability of a match, (...,) in [0, 1], for standardised `scores` (..., features)."""
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return torch.sigmoid(scores.double().asinh() @ weights + self.bias)


def fit_rejection(scores: Tensor, matches: Tensor) -> Rejection:
    """Return the rejection fitted to `scores` (n, features) and `matches` (n,) bool by penalised maximum likelihood.

    Both classes have the same total weight; the penalty is |weights|² / 2 on a likelihood that is summed over n, as in
    scikit-learn's C = 1. The problem is convex: the result depends on the data alone.
    """
    if bool(matches.all()) or not bool(matches.any()):
        raise InvalidInput("matches are all true or all false; expected some of each")
    # SciPy takes a second to import.
    from scipy.optimize import minimize

    x = scores.double().asinh().numpy()
    y = matches.numpy().astype(np.float64)
    share = np.where(y > 0, 0.5 / y.mean(), 0.5 / (1 - y.mean()))

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        weights, signed = theta[1:], 2 * y - 1
        margin = signed * (x @ weights + theta[0])
        pull = -share * signed * np.exp(-np.logaddexp(0, margin))
        value = float((share * np.logaddexp(0, -margin)).sum() + weights @ weights / 2)
        return value, np.concatenate([[pull.sum()], x.T @ pull + weights])

    bounds = [(None, None), *[(0, None)] * x.shape[1]]
    solution = minimize(loss, np.zeros(x.shape[1] + 1), jac=True, method="L-BFGS-B", bounds=bounds)
    return Rejection(tuple(float(w) for w in solution.x[1:]), float(solution.x[0]))
