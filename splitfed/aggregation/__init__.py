"""Aggregation rules: how a server combines the weights of several clients; one rule a file, imported on first use."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.aggregation.base import AggregationRule as AggregationRule
    from splitfed.aggregation.geometric_median import GeometricMedian as GeometricMedian
    from splitfed.aggregation.krum import Krum as Krum
    from splitfed.aggregation.mean import WeightedMean as WeightedMean
    from splitfed.aggregation.median import Median as Median
    from splitfed.aggregation.server_steps import (
        FedAdagrad as FedAdagrad,
        FedAdam as FedAdam,
        FedAvgM as FedAvgM,
        FedYogi as FedYogi,
        ServerStep as ServerStep,
    )
    from splitfed.aggregation.trimmed_mean import TrimmedMean as TrimmedMean
    from splitfed.aggregation.update_aggregation import UpdateAggregation as UpdateAggregation

make_lazy(__name__)
