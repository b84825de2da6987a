"""Convex combination of several predictions, with weights from non-negative least squares on held-out rows.

Source: stacking, Breiman, "Stacked regressions", Machine Learning 24, 1996, whose weights are not negative either; that
they sum to one is ours, so that predictions stay in the range of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def combine(truth: Tensor, own: Sequence[Tensor], count: int) -> tuple[list[float], Tensor]:
    """Return the weights of the predictions `own` of held-out rows, and their cross-fitted combination.

    `truth`: (n, *shape); `own`: predictions of the same shape. The combination of each half of the rows uses weights
    fitted to the other half; NaN for a single row. Rows repeat after every `count` rows.
    """
    halves = torch.arange(len(truth)) % count % 2 == 0
    weights = convex_weights(own, truth)
    crossed = torch.full_like(truth, torch.nan)
    for fitted in (halves, ~halves):
        if bool(fitted.any()):
            found = convex_weights([p[fitted] for p in own], truth[fitted])
            crossed[~fitted] = weigh(found, [p[~fitted] for p in own])
    return weights, crossed


def weigh(weights: Sequence[float], predictions: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of `predictions`."""
    return torch.stack([w * p for w, p in zip(weights, predictions, strict=True)]).sum(0)


def convex_weights(predictions: Sequence[Tensor], truth: Tensor) -> list[float]:
    """Return weights >= 0 of sum 1 that minimise the squared error of the weighted `predictions` of `truth`.

    truth and predictions: (rows, *shape).
    """
    # scipy's optimizers take a third of a second to import.
    from scipy.optimize import nnls

    columns = torch.stack([(p - truth).flatten() for p in predictions], 1).double()
    # With weights of sum 1 the error is |columns w|²; its factor is small, however many rows there are.
    factor: Any = np.linalg.qr(columns.numpy(), mode="r")
    factor = factor / max(float(np.abs(factor).max()), 1e-300)
    # min |R w|² for w >= 0 and sum w = 1 is, but for its length, min |R w|² + (sum w - 1)².
    found, _ = nnls(np.vstack([factor, np.ones(len(predictions))]), np.r_[np.zeros(len(factor)), 1.0])
    return [float(w) for w in found / found.sum()]
