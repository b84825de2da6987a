"""Exact two-means clustering of scores in one dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def boundary(scores: Tensor) -> float:
    """Return the midpoint between the two clusters of `scores` (n,) with the least sum of squares within.

    All splits of the sorted scores are compared, so there is no random start. For a single score, or equal ones, the
    result is that score.
    """
    ordered = scores.detach().double().cpu().sort().values
    if len(ordered) < 2:
        return float(ordered[0])
    count = torch.arange(1, len(ordered), dtype=torch.float64)
    below = ordered.cumsum(0)[:-1]
    above = ordered.sum() - below
    # The sum of squares within the groups is a constant less this.
    explained = below.square() / count + above.square() / (len(ordered) - count)
    best = int(explained.argmax())
    return float((below[best] / count[best] + above[best] / (len(ordered) - count[best])) / 2)
