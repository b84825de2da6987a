"""Confidence intervals of means, within a metric's range: Student t over seeds, Wilson's and the bootstrap over rows.

Papers: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22, 1927, for shares of
rows; Korn, Graubard, "Confidence intervals for proportions with small expected number of positive counts estimated from
survey data", Survey Methodology 24, 1998, for the t interval on the logit scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_number

_CHUNK = 1 << 22  # resampled values held at a time


@dataclass(frozen=True)
class Interval:
    """Mean of `n` values and the bounds of its interval, NaN for a single value.

    For reconstructions also the `median`, and the mean of the `worst_decile`, the tenth of the victims (rounded up)
    that was recovered best; None for other scores.
    """

    mean: float
    low: float
    high: float
    n: int
    median: float | None = None
    worst_decile: float | None = None

    @property
    def known(self) -> bool:
        """Whether the bounds are known, which needs at least two values."""
        return not math.isnan(self.low)

    def __str__(self) -> str:
        bounds = f"[{self.low:.4g}, {self.high:.4g}], " if self.known else ""
        return f"{self.mean:.4g} ({bounds}n={self.n})"


def mean_interval(
    values: Iterable[float], level: float = 0.95, *, low: float = -math.inf, high: float = math.inf
) -> Interval:
    """Return the mean of independent `values` (one a seed) and its Student t interval at `level` in (0, 1).

    `low`, `high`: range of the values, infinite if unbounded. The interval lies within it: its half width is
    transformed by the delta method to an unbounded scale (logit, or the logarithm of the distance from a single bound).
    The bounds of a single value are NaN, as its spread is unknown. Raises `InvalidInput` for values outside the range.
    """
    from scipy.special import stdtrit

    numbers = _finite(torch.as_tensor(list(values), dtype=torch.float64), level)
    if not low < high:
        raise InvalidInput(f"low={low!r} is not allowed; expected less than high={high!r}")
    outside = numbers[(numbers < low) | (numbers > high)]
    if len(outside):
        raise InvalidInput(f"values hold {float(outside[0])}; expected numbers in [{low:g}, {high:g}]")
    n, mean = len(numbers), float(numbers.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stdtrit(n - 1, (1 + level) / 2)) * float(numbers.std()) / math.sqrt(n)
    return Interval(mean, *_bounded_interval(mean, half, low, high), n)


def _bounded_interval(mean: float, half: float, low: float, high: float) -> tuple[float, float]:
    """Return the bounds mean -+ half, computed on a scale on which [low, high] is unbounded."""
    bounded = math.isfinite(low), math.isfinite(high)
    if half == 0 or not any(bounded):
        return mean - half, mean + half
    if not low < mean < high:  # rounding alone: the mean of values that differ lies inside
        return mean, mean
    if all(bounded):
        # Both from their own end: 1 - share would be 0 for a mean that is next to `high`.
        share, rest = (mean - low) / (high - low), (high - mean) / (high - low)
        if share == 0 or rest == 0:
            return mean, mean
        # exp(-x) tends to 0 without an overflow, so both ends are written with it.
        fall = math.exp(-half / (high - low) / share / rest)
        return (
            low + (high - low) * share * fall / (rest + share * fall),
            high - (high - low) * rest * fall / (share + rest * fall),
        )
    away = mean - low if bounded[0] else high - mean
    near, far = away * math.exp(-half / away), away * math.exp(min(half / away, 700.0))
    return (low + near, low + far) if bounded[0] else (high - far, high - near)


def share_interval(right: int, rows: int, level: float = 0.95) -> Interval:
    """Return the share `right` / `rows`, such as an accuracy, with Wilson's score interval at `level`, within [0, 1].

    The interval covers the draw of other rows under the same trained model, not other trainings. Raises `InvalidInput`
    unless 0 < level < 1, rows >= 1 and 0 <= right <= rows.
    """
    check_number("level", level, low=0, high=1, open_low=True, open_high=True)
    check_count("rows", rows, low=1)
    check_count("right", right)
    if right > rows:
        raise InvalidInput(f"right={right!r} is not allowed; expected at most rows={rows!r}")
    z, share = NormalDist().inv_cdf((1 + level) / 2), right / rows
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / (1 + z * z / rows)
    return Interval(
        share, max(0.0, middle - half) if right else 0.0, min(1.0, middle + half) if right < rows else 1.0, rows
    )


def metric_interval(
    metric: Callable[[Tensor, Tensor], float],
    output: Tensor,
    y: Tensor,
    generator: torch.Generator,
    level: float = 0.95,
    resamples: int = 300,
) -> Interval:
    """Return `metric(output, y)` over all rows with its percentile bootstrap interval over rows, at `level`.

    output (rows, ...), y (rows, ...). Rows are resampled with replacement `resamples` times, so the bounds are values
    of the metric and lie in its range. They are NaN for one row, and if the metric is NaN on more than a tenth of the
    resamples.
    """
    check_count("resamples", resamples, low=1)
    check_number("level", level, low=0, high=1, open_low=True, open_high=True)
    value, rows = float(metric(output, y)), len(y)
    resampled = []
    for _ in range(resamples if rows > 1 else 0):
        row_indices = torch.randint(rows, (rows,), generator=generator, device=generator.device).to(output.device)
        try:
            resampled.append(float(metric(output[row_indices], y[row_indices])))
        except (ArithmeticError, ValueError, RuntimeError):
            # A metric of the user's own may refuse rows of a single class, which a drawing may hold.
            continue
    finite = torch.tensor([v for v in resampled if math.isfinite(v)], dtype=torch.float64)
    if rows < 2 or len(finite) < 0.9 * resamples:
        return Interval(value, math.nan, math.nan, rows)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = finite.quantile(tails).tolist()
    return Interval(value, low, high, rows)


def bootstrap_interval(
    values: Tensor, generator: torch.Generator, level: float = 0.95, resamples: int = 2000
) -> Interval:
    """Return the mean of `values` (n,), one a victim, and its percentile bootstrap interval at `level`.

    Victims are resampled with replacement `resamples` times; the bounds are quantiles of the means. The interval covers
    other victims under the same trained models, not other seeds. The bounds of a single value are NaN.
    """
    check_count("resamples", resamples, low=1)
    numbers = _finite(values.detach().to(generator.device, torch.float64), level)
    n, mean = len(numbers), float(numbers.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    rows = max(1, _CHUNK // n)
    sizes = ((min(rows, resamples - start), n) for start in range(0, resamples, rows))
    drawn = (torch.randint(n, size, generator=generator, device=generator.device) for size in sizes)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=numbers.device)
    low, high = torch.cat([numbers[indices].mean(1) for indices in drawn]).quantile(tails).tolist()
    return Interval(mean, low, high, n)


def finite_numbers(what: str, values: Tensor) -> Tensor:
    """Return `values`, called `what` in errors; raise `InvalidInput` unless they are (n,) finite numbers, n >= 1."""
    if values.dim() != 1 or len(values) == 0:
        raise InvalidInput(f"{what} have shape {tuple(values.shape)}; expected (n,) with n >= 1")
    if not bool(torch.isfinite(values).all()):
        raise InvalidInput(f"{what} hold {float(values[~torch.isfinite(values)][0])}; expected finite numbers")
    return values


def _finite(values: Tensor, level: float) -> Tensor:
    check_number("level", level, low=0, high=1, open_low=True, open_high=True)
    return finite_numbers("values", values)
