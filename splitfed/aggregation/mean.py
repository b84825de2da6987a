"""Mean: every number is averaged over the clients, weighted by their examples.

Paper: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017.

One part after another is added up, so the memory does not grow with the clients. One client can move it anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.aggregation.base import Accumulator, AggregationRule
from splitfed.aggregation.running_mean import RunningMean


@dataclass(frozen=True, kw_only=True)
class WeightedMean(AggregationRule):
    """The mean, weighted by examples where the schedule weighs."""

    @property
    def by_itself(self) -> bool:
        """A sum is all that it needs."""
        return False

    def start(self) -> Accumulator:
        """Return a running sum."""
        return RunningMean()
