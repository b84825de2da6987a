"""Gaussians of the confidence in a row over copies of a model, as likelihood-ratio attacks compare them.

Paper: Carlini, Chien, Nasr, Song, Terzis, Tramèr, "Membership inference attacks from first principles", IEEE S&P 2022.
"""

from __future__ import annotations

from torch import Tensor

_LEAST = 1e-3  # of a standard deviation, in log odds: copies that agree to the bit prove nothing


def moments(values: Tensor, chosen: Tensor, pooled: bool) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the `chosen` entries of each column of `values` (copies, n): (n,) each.

    `pooled`: whether all columns share the root of the mean variance. Every column needs two chosen entries.
    """
    count = chosen.sum(0)
    mean = (values * chosen).sum(0) / count
    variance = ((values - mean).square() * chosen).sum(0) / (count - 1)
    if pooled:
        variance = variance.mean().expand_as(mean)
    return mean, variance.sqrt().clamp_min(_LEAST)


def log_density(value: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the log density of Gaussians at `value`, up to a constant that all of them share."""
    return -((value - mean) / deviation).square() / 2 - deviation.log()
