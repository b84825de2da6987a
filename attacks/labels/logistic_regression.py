"""Logistic regression with a ridge penalty, on hard or soft labels, fitted to its unique minimum.

Source: multinomial logistic regression, Cox, "The regression analysis of binary sequences", Journal of the Royal
Statistical Society B 20, 1958; Bishop, "Pattern recognition and machine learning", 2006, section 4.3. The loss is that
of scikit-learn's `LogisticRegression(C=1)`: the sum of cross-entropies over the rows plus half the squared weights,
without a penalty on intercepts. Two classes have one column of weights, more classes have one each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 100
"""Maximum iterations of L-BFGS."""
LEAST = 1e-9
"""Relative deviation below which a column counts as constant and is dropped."""


@dataclass(frozen=True)
class LogisticRegression:
    """Weights (numbers, classes) and intercepts (classes,) on the scale of standardised rows; float64."""

    weights: Tensor
    intercepts: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the log probabilities of `rows` (n, numbers): (n, classes)."""
        found: Tensor = (rows @ self.weights + self.intercepts).log_softmax(1)
        return found


def fit_logistic(rows: Tensor, labels: Tensor, penalty: float = 1.0) -> LogisticRegression:
    """Return the regression of `labels` (n, classes), probabilities of each class, on `rows` (n, numbers) in float64.

    `penalty`: factor of half the squared weights, >= 0.
    """
    classes = labels.shape[1]
    # The first of two classes is the reference: with a column each the same penalty would count half.
    columns = 1 if classes == 2 else classes
    weights = rows.new_zeros(rows.shape[1], columns, requires_grad=True)
    intercepts = rows.new_zeros(columns, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, intercepts],
        max_iter=STEPS,
        tolerance_grad=1e-8,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss = -(labels * _widened(rows @ weights + intercepts).log_softmax(1)).sum()
        loss = loss + penalty / 2 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(loss)
    return LogisticRegression(_widened(weights.detach()), _widened(intercepts.detach()))


def _widened(columns: Tensor) -> Tensor:
    """Return `columns` (..., columns), with the reference class in front of a single one."""
    return torch.cat([torch.zeros_like(columns), columns], -1) if columns.shape[-1] == 1 else columns


def standardise(rows: Tensor) -> Tensor:
    """Return `rows` (n, numbers) in float64 with every column at mean 0 and deviation 1; constant ones are dropped."""
    found = rows.double()
    centered = found - found.mean(0)
    deviation = centered.square().mean(0).sqrt()
    varies = deviation > LEAST * found.abs().amax(0).clamp_min(torch.finfo(torch.float64).tiny)
    return centered[:, varies] / deviation[varies]
