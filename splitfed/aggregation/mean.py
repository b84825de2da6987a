"""Mean: every number is averaged over the clients, weighted by their examples.

Paper: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017.

Uploads are added up as they arrive, so memory does not grow with the number of clients. The mean is not robust: a
single client can move it to any value.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.aggregation.base import Accumulator, AggregationRule
from splitfed.aggregation.running_mean import RunningMean


@dataclass(frozen=True, kw_only=True)
class WeightedMean(AggregationRule):
    """Mean of the uploads, weighted by the number of examples where the schedule asks for that."""

    @property
    def by_itself(self) -> bool:
        """False: the sum of the uploads suffices."""
        return False

    def start(self) -> Accumulator:
        """Return an empty running mean."""
        return RunningMean()
