"""Trimmed mean: number by number, the largest and the smallest values are left out and the rest averaged.

Paper: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018 (algorithm 1, option II).

Of n clients, fraction * n (rounded up, so that at least one is left out) are removed at either end. The remaining ones
count the same, as in the paper. The paper aggregates gradients at every step; here weights are, once a round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.aggregation.base import AggregationRule
from splitfed.core.errors import InvalidInput, require_number


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(AggregationRule):
    """Mean without the `fraction`, in (0, 0.5), of largest and smallest values; at least the share of bad clients."""

    fraction: float = field(
        default=0.2, metadata=require_number("trimmed_mean fraction", low=0.0, high=0.5, open_low=True, open_high=True)
    )

    def trimmed(self, parts: int) -> int:
        """Return how many values of `parts` clients are removed at either end."""
        return math.ceil(self.fraction * parts - 1e-9)

    def check(self, parts: int) -> None:
        """Raise `InvalidInput` if trimming would leave no client."""
        if 2 * self.trimmed(parts) >= parts:
            raise InvalidInput(
                f"trimmed_mean fraction={self.fraction} of {parts} clients leaves out {self.trimmed(parts)} on either "
                "side, and none remains: take more clients or a smaller fraction"
            )

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return the mean of the remaining values of every column, (parts, numbers) -> (numbers,)."""
        out = self.trimmed(len(rows))
        return torch.sort(rows, 0).values[out : len(rows) - out].mean(0)
