"""Fusions: how servers make one model of what several clients trained; one a file."""

from splitfed.engines.fusion import Fusion
from splitfed.fusions.geometric_median import GeometricMedian
from splitfed.fusions.krum import Krum
from splitfed.fusions.mean import WeightedMean
from splitfed.fusions.median import Median
from splitfed.fusions.trimmed_mean import TrimmedMean

__all__ = ["Fusion", "GeometricMedian", "Krum", "Median", "TrimmedMean", "WeightedMean"]
