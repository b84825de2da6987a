"""Fusions: how servers make one model of what several clients trained; one a file."""

from splitfed.aggregation.base import AggregationRule
from splitfed.aggregation.geometric_median import GeometricMedian
from splitfed.aggregation.krum import Krum
from splitfed.aggregation.mean import WeightedMean
from splitfed.aggregation.median import Median
from splitfed.aggregation.server_steps import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerStep
from splitfed.aggregation.trimmed_mean import TrimmedMean
from splitfed.aggregation.update_aggregation import UpdateAggregation

__all__ = [
    "AggregationRule",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "GeometricMedian",
    "Krum",
    "Median",
    "ServerStep",
    "TrimmedMean",
    "UpdateAggregation",
    "WeightedMean",
]
