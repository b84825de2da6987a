"""The Gaussian mechanism, exactly: delta for an epsilon, epsilon for a delta, and the least noise for both.

Paper: Balle, Wang, "Improving the Gaussian mechanism for differential privacy: analytical calibration and optimal
denoising", ICML 2018.

`noise_multiplier` is the noise's standard deviation per unit of L2 sensitivity. T Gaussian releases with the
multipliers s_1 ... s_T, chosen adaptively, are together exactly as private as one with (sum 1 / s_i²)^(-1/2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from splitfed.core.errors import check_number

_NUDGE = 1 + 1e-10
"""Tolerance of roots; returned values are rounded to the safe side."""

LARGEST_EPSILON = 1e6
"""Largest epsilon: beyond it a delta is lost in rounding, and the guarantee is meaningless."""


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Return the least delta with which one release is (`epsilon`, delta)-private."""
    from scipy.special import log_ndtr

    check_number("noise_multiplier", noise_multiplier, low=0.0, open_low=True)
    check_number("epsilon", epsilon, low=0.0)
    mean = 1 / noise_multiplier
    first = float(log_ndtr(mean / 2 - epsilon / mean))
    second = epsilon + float(log_ndtr(-mean / 2 - epsilon / mean))
    # A difference of two numbers that are nearly the same: taken in logarithms, so that small deltas stay exact.
    return max(0.0, -math.exp(first) * math.expm1(second - first))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Return the least epsilon with which one release is (epsilon, `delta`)-private."""
    from scipy.optimize import brentq

    check_number("noise_multiplier", noise_multiplier, low=0.0, open_low=True)
    check_number("delta", delta, low=0.0, high=1.0, open_low=True, open_high=True)
    if gaussian_delta(noise_multiplier, 0.0) <= delta:
        return 0.0
    mean = 1 / noise_multiplier
    # The tail of the privacy loss, which is normal with mean m²/2 and deviation m, bounds delta.
    high = mean * mean / 2 + mean * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    epsilon = brentq(lambda e: gaussian_delta(noise_multiplier, e) - delta, 0.0, high, xtol=1e-12, rtol=1e-12)
    return float(epsilon) * _NUDGE


def multiplier_of(noise_multiplier: float | None, epsilon: float | None, delta: float) -> float:
    """Return `noise_multiplier` or, if it is None, that of a release that is (`epsilon`, `delta`)-private."""
    if noise_multiplier is not None:
        return noise_multiplier
    assert epsilon is not None
    return gaussian_multiplier(epsilon, delta)


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Return the least noise multiplier with which one release is (`epsilon`, `delta`)-private."""
    from scipy.optimize import brentq

    check_number("epsilon", epsilon, low=0.0, high=LARGEST_EPSILON, open_low=True)
    check_number("delta", delta, low=0.0, high=1.0, open_low=True, open_high=True)

    def excess(exponent: float) -> float:
        return gaussian_delta(math.exp(exponent), epsilon) - delta

    low, high = -1.0, 1.0
    while excess(low) < 0:
        low -= 2
    while excess(high) > 0:
        high += 2
    return math.exp(float(brentq(excess, low, high, xtol=1e-12))) * _NUDGE


def combine_multipliers(multipliers: Iterable[tuple[float, int]]) -> float:
    """Return the multiplier of one release that is as private as the composition of all (multiplier, times)."""
    return 1 / math.sqrt(math.fsum(times / multiplier**2 for multiplier, times in multipliers))
