"""Defenses: what protects a release, a gradient or a loss; one a file."""

from splitfed.defenses.distance_correlation import DistanceCorrelation
from splitfed.defenses.noise import Noise

__all__ = ["DistanceCorrelation", "Noise"]
