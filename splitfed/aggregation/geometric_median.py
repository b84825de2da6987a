"""Geometric median: the point with the least weighted sum of distances to all uploads.

Paper: Pillutla, Kakade, Harchaoui, "Robust aggregation for federated learning", IEEE Transactions on Signal Processing
2022 (RFA: the smoothed Weiszfeld algorithm); Yu, Verma, et al., "Fed+: a unified approach to robust personalized
federated learning", 2020 (the geometric median as a fusion of Fed+).

Weiszfeld: from the weighted mean on, z becomes the mean of the uploads w_k weighted by share_k / max(smoothing,
|z - w_k|). RFA takes three such steps, for each is a secure sum of its own there; here one server has every upload, so
the steps go on until the sum of distances falls by less than one part in 10^9, `steps` at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from splitfed.aggregation.base import AggregationRule
from splitfed.core.errors import check_count, require_count, require_number

FALL = 1e-9
"Weiszfeld steps end when the sum of distances falls by less than this fraction of itself."


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(AggregationRule):
    """Geometric median, weighted by the clients' shares; `smoothing` is a distance in units of the weights.

    Uploads that hold less than half of the total weight can move it by a bounded distance only.
    """

    steps: int = field(default=200, metadata=require_count("geometric_median steps", low=1))
    smoothing: float = field(
        default=1e-6, metadata=require_number("geometric_median smoothing", low=0.0, open_low=True)
    )

    def check(self, parts: int) -> None:
        """Raise `InvalidInput` for fewer than three parties: of two, every point between them is a geometric median."""
        check_count("clients to take the geometric median of", parts, low=3)

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return the median, weighted by `shares`."""
        median = shares @ rows
        previous_total = float("inf")
        for _ in range(self.steps):
            distances = (rows - median).norm(dim=1)
            total = float(shares @ distances)
            if total >= previous_total * (1 - FALL):
                break
            previous_total = total
            pull = shares / distances.clamp(min=self.smoothing)
            median = (pull / pull.sum()) @ rows
        return median
