"""Intervals for means: Student t over seeds, and the bootstrap over victims."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.errors import InvalidInput, check_count, check_number

_CHUNK = 1 << 22  # resampled values held at a time


@dataclass(frozen=True)
class Interval:
    """A mean of `n` values, with the bounds of its interval; one value has none, so its bounds are NaN."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        """Whether there are bounds, which takes at least two values."""
        return not math.isnan(self.low)

    def __str__(self) -> str:
        bounds = f"[{self.low:.4g}, {self.high:.4g}], " if self.known else ""
        return f"{self.mean:.4g} ({bounds}n={self.n})"


def mean_interval(values: Iterable[float], level: float = 0.95) -> Interval:
    """Return the mean of independent `values` (one a seed) and its Student t interval at `level` in (0, 1).

    A single value gives NaN for bounds, not an interval of width 0: nothing is known of its spread.
    """
    from scipy.special import stdtrit

    numbers = _finite(torch.as_tensor(list(values), dtype=torch.float64), level)
    n, mean = len(numbers), float(numbers.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stdtrit(n - 1, (1 + level) / 2)) * float(numbers.std()) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def bootstrap_interval(
    values: Tensor, generator: torch.Generator, level: float = 0.95, resamples: int = 2000
) -> Interval:
    """Return the mean of `values` (n,), one a victim, and its percentile bootstrap interval at `level`.

    The victims are drawn again with replacement `resamples` times; the bounds are quantiles of the means. They
    speak of other victims under the same trained models, not of other seeds. One value gives NaN for bounds.
    """
    check_count("resamples", resamples, low=1)
    numbers = _finite(values.detach().to(generator.device, torch.float64), level)
    n, mean = len(numbers), float(numbers.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    rows = max(1, _CHUNK // n)
    means = []
    for start in range(0, resamples, rows):
        size = (min(rows, resamples - start), n)
        means.append(numbers[torch.randint(n, size, generator=generator, device=generator.device)].mean(1))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=numbers.device)
    low, high = torch.cat(means).quantile(tails).tolist()
    return Interval(mean, low, high, n)


def _finite(values: Tensor, level: float) -> Tensor:
    check_number("level", level, low=0, high=1, open_low=True, open_high=True)
    if values.dim() != 1 or len(values) == 0:
        raise InvalidInput(f"values have shape {tuple(values.shape)}; expected (n,) with n >= 1")
    if not bool(torch.isfinite(values).all()):
        raise InvalidInput(f"values hold {float(values[~torch.isfinite(values)][0])}; expected finite numbers")
    return values
