"""Median: the middle value over the clients, number by number.

Paper: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018 (algorithm 1, option I).

For an even number of clients it is the mean of the two middle values. As in the paper, every client counts the same,
whatever its share of the examples. The paper aggregates gradients at every step; here weights are, once a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.aggregation.base import AggregationRule
from splitfed.core.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Median(AggregationRule):
    """Coordinate-wise median; fewer than half of the clients cannot move it outside the range of the honest values."""

    def check(self, parts: int) -> None:
        """Raise `InvalidInput` for fewer than three parties: the median of two is their mean."""
        if parts < 3:
            raise InvalidInput(
                f"the median needs three clients or more, and a round may end with {parts}: let more take part "
                "(clients_per_round), or where clients drop out raise the quorum below which nothing is aggregated"
            )

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return the median of every column, (parts, numbers) -> (numbers,)."""
        ordered = torch.sort(rows, 0).values
        count = len(rows)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
