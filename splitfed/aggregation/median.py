"""Median: the middle value over the clients, number by number.

Paper: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018 (algorithm 1, option I).

Of an even number of clients it is the mean of the two in the middle. Every client counts the same, as in the paper,
whatever its share of the examples. There it fuses gradients at every step, here weights once a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.aggregation.base import AggregationRule
from splitfed.core.errors import check_count


@dataclass(frozen=True, kw_only=True)
class Median(AggregationRule):
    """Number by number the median; fewer than half of the clients cannot move it past the honest ones' values."""

    def check(self, parts: int) -> None:
        """Refuse fewer than three: the median of two is their mean."""
        check_count("clients to take the median of", parts, low=3)

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return the middle of every column."""
        ordered = torch.sort(rows, 0).values
        count = len(rows)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
