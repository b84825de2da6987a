"""Trimmed mean: number by number, the largest and the smallest values are left out and the rest averaged.

Paper: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018 (algorithm 1, option II).

Of n clients, fraction * n (rounded up, so that something is always left out) go on either side. The rest count the
same, as in the paper. There it fuses gradients at every step, here weights once a round.
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
    """`fraction`, in (0, 0.5), of the clients on either side is left out: at least the share of bad ones."""

    fraction: float = field(
        default=0.2, metadata=require_number("trimmed_mean fraction", low=0.0, high=0.5, open_low=True, open_high=True)
    )

    def trimmed(self, parts: int) -> int:
        """Return how many of `parts` are left out on either side."""
        return math.ceil(self.fraction * parts - 1e-9)

    def check(self, parts: int) -> None:
        """Refuse so few that nobody would be left."""
        if 2 * self.trimmed(parts) >= parts:
            raise InvalidInput(
                f"trimmed_mean fraction={self.fraction} of {parts} clients leaves out {self.trimmed(parts)} on either "
                "side, and nobody stays: take more clients or a smaller fraction"
            )

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return the mean of what stays of every column."""
        out = self.trimmed(len(rows))
        return torch.sort(rows, 0).values[out : len(rows) - out].mean(0)
