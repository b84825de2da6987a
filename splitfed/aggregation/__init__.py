"""Fusions: how servers make one model of what several clients trained; one a file."""

from splitfed.aggregation.base import AggregationRule
from splitfed.aggregation.geometric_median import GeometricMedian
from splitfed.aggregation.krum import Krum
from splitfed.aggregation.mean import WeightedMean
from splitfed.aggregation.median import Median
from splitfed.aggregation.trimmed_mean import TrimmedMean

__all__ = ["AggregationRule", "GeometricMedian", "Krum", "Median", "TrimmedMean", "WeightedMean"]
