"""Optimal noise for two Gaussian classes: the least sum of both Kullback-Leibler divergences at a given power.

Paper: Li, Sun, Yang, Gao, Zhang, Xie, Smith, Wang, "Label leakage and protection in two-party split learning", ICLR
2022, theorem 2.

Negatives have covariance u I, positives v I, in d dimensions; the means differ by Delta. Each class gets noise of
variance `along` in the direction of Delta and `around` in every other. The sum of the divergences of the noised classes
is

    (d-1)/2 (A + 1/A) + (a + |Delta|²)/(2b) + (b + |Delta|²)/(2a) - d

with a = u + along of the negatives, b = v + along of the positives, A the ratio of u, v plus around. It is minimised
over along >= around >= 0 such that the mean power over both classes, p of them positive, is at most the budget. The
class of greater variance needs no noise `around` (the paper's theorem; a test compares with a search over all four
numbers). For a given `around` of the other, the sum is convex along the line of equal power and its minimum is known in
closed form, so that a search over one number is left; the paper's code alternates between three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_POINTS = 128
_ZOOMS = 3


@dataclass(frozen=True)
class NoiseVariances:
    """Noise variances for negatives (0) and positives (1), along the difference of means and around it.

    `around`: in every orthogonal direction. `sum_kl`: the remaining sum of the divergences, in nats; infinite if a
    class without variance gets no noise.
    """

    along: tuple[float, float]
    around: tuple[float, float]
    sum_kl: float

    @property
    def detection_error(self) -> float:
        """Lower bound 1/2 - sqrt(sum_kl)/4, in [0, .5], on the mean error of any detector.

        The mean is that of false positive and false negative rate. The bound holds for classes that are Gaussian as
        assumed, and for a detector that reads one example.
        """
        return detection_error(self.sum_kl)


def detection_error(sum_kl: float) -> float:
    """Return the lower bound max(1/2 - sqrt(sum_kl)/4, 0) on any detector's mean of both error rates."""
    return max(0.5 - math.sqrt(sum_kl) / 4, 0.0)


def sum_kl(along: tuple[float, float], around: tuple[float, float], u: float, v: float, d: int, gap: float) -> float:
    """Return the sum of both divergences of the noised classes.

    `u`, `v`: variances of the classes before noise; `gap`: squared distance of their means.
    """
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (along[0] + u, along[1] + v))
    c, e = (torch.tensor(x, dtype=torch.float64) for x in (around[0] + u, around[1] + v))
    return float(_kl_of_other_dimensions(c, e, d) + _kl_along_difference(a, b, gap))


def least_sum_kl(u: float, v: float, d: int, gap: float, p: float, power: float) -> NoiseVariances:
    """Return the optimal noise for classes of variances `u` (negatives), `v` (positives) per dimension of `d`.

    `gap` > 0: squared distance of their means. `p` in (0, 1): share of positives. `power` >= 0: upper limit of the mean
    over examples of the noise's expected squared length.
    """
    if v < u:
        other = least_sum_kl(v, u, d, gap, 1 - p, power)
        return NoiseVariances((other.along[1], other.along[0]), (other.around[1], other.around[0]), other.sum_kl)
    # In units of the gap all numbers are of moderate size.
    u, v, power = u / gap, v / gap, power / gap
    around = torch.zeros(1, dtype=torch.float64)
    most = power / ((1 - p) * d)
    if d > 1 and most > 0:
        # The minimum may lie many orders of magnitude below the greatest value allowed.
        candidates = torch.cat([around, most * torch.logspace(-12, 0, _POINTS, dtype=torch.float64)])
        for _ in range(_ZOOMS):
            best = int(_value(candidates, u, v, d, p, power).argmin())
            low, high = float(candidates[max(best - 1, 0)]), float(candidates[min(best + 1, len(candidates) - 1)])
            # The best one so far stays in.
            candidates = torch.cat(
                [candidates[best : best + 1], torch.linspace(low, high, _POINTS, dtype=torch.float64)]
            )
            candidates = candidates.sort().values
        around = candidates[_value(candidates, u, v, d, p, power).argmin()].view(1)
    a, b = _best_variances(around, u, v, d, p, power)
    value = float(_value(around, u, v, d, p, power))
    along = (max(float(a) - u, float(around)) * gap, max(float(b) - v, 0.0) * gap)
    return NoiseVariances(along, (float(around) * gap, 0.0), max(value, 0.0))


def _value(around: Tensor, u: float, v: float, d: int, p: float, power: float) -> Tensor:
    """Return the least sum of divergences for each `around` of the negatives, (n,), at a gap of one."""
    a, b = _best_variances(around, u, v, d, p, power)
    return _kl_of_other_dimensions(around + u, torch.tensor(v, dtype=torch.float64), d) + _kl_along_difference(
        a, b, 1.0
    )


def _best_variances(around: Tensor, u: float, v: float, d: int, p: float, power: float) -> tuple[Tensor, Tensor]:
    """Return the optimal variances (a, b) along the difference, classes plus noise, with the remaining power."""
    left = power - (1 - p) * (d - 1) * around + p * v + (1 - p) * u
    slope = ((left + (1 - p)) / (left + p)).sqrt()
    a = left / (p * slope + (1 - p))
    # On the line of equal power the sum is convex, so that the nearest point allowed is the best one.
    a = torch.minimum(torch.maximum(a, around + u), (left - p * v) / (1 - p))
    return a, (left - (1 - p) * a) / p


def _kl_of_other_dimensions(c: Tensor, e: Tensor, d: int) -> Tensor:
    """Return the contribution of the d - 1 orthogonal dimensions: (d-1)/2 (c/e + e/c - 2); 0 for equal variances."""
    if d == 1:
        return torch.zeros(())
    return torch.where(c == e, 0.0, (d - 1) / 2 * (c - e).square() / (c * e))


def _kl_along_difference(a: Tensor, b: Tensor, gap: float) -> Tensor:
    """Return the contribution of the direction of the difference: (a + gap)/(2b) + (b + gap)/(2a) - 1."""
    return (a - b).square() / (2 * a * b) + gap / 2 * (1 / a + 1 / b)
