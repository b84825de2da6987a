"""Rényi differential privacy of every mechanism with an event, and its conversion to epsilon and delta.

Paper: Mironov, "Rényi differential privacy", CSF 2017 (Gaussian, Laplace, composition); Bun, Steinke, "Concentrated
differential privacy", TCC 2016 (the divergence of a pure mechanism is at most that of randomised response); Mironov,
Talwar, Zhang, "Rényi differential privacy of the sampled Gaussian mechanism", 2019, computed by Opacus; Canonne,
Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020, for the conversion.

Laplace noise on a vector is worst where the whole L1 sensitivity lies in one coordinate: the divergence is convex in
the shift and zero at no shift, so it is superadditive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from splitfed.core.privacy_events import Event, Gaussian, Laplace, Mechanism

Array = npt.NDArray[np.float64]

SAMPLED_ORDERS = (*(1 + i / 10 for i in range(1, 100)), *range(11, 65), 72, 80, 96, 128, 192, 256, 512)
"""Rényi orders for sampled mechanisms; large orders are slow for these."""

ORDERS = (*(1 + 10 ** (i / 25) for i in range(-100, 0)), *SAMPLED_ORDERS, *(10 ** (i / 20) for i in range(55, 160)))
"""Rényi orders without sampling, up to 10^8: close to pure privacy, large orders give the least epsilon."""


LEAST_SAMPLED = 1e-3
"""Noise multiplier below which amplification by sampling is ignored, as terms of the divergence would overflow."""


def renyi(event: Event, orders: Sequence[float]) -> Array:
    """Return the Rényi divergence of one use of `event` at each of `orders`, all > 1; infinite on overflow."""
    a = np.asarray(orders, dtype=float)
    with np.errstate(all="ignore"):
        if event.sampling_rate == 1.0:
            return _whole(event.mechanism, a)
        if isinstance(event.mechanism, Gaussian):
            return _sampled(event.mechanism, event.sampling_rate, a)
        return _pure(sampled_epsilon(pure_epsilon(event.mechanism), event.sampling_rate), a)


def renyi_epsilon(orders: Sequence[float], divergences: Array, delta: float) -> tuple[float, float]:
    """Return the least epsilon >= 0 that Rényi divergences imply at `delta` in (0, 1), and the order that implies it.

    `divergences`: (n,) at the n `orders` > 1; infinite ones are ignored. The epsilon is infinite if all are. Source:
    Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020, proposition 12.
    """
    a = np.asarray(orders, dtype=float)
    found = divergences + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    found = np.where(np.isfinite(divergences), found, np.inf)
    best = int(np.argmin(found))
    return max(0.0, float(found[best])), float(a[best])


def pure_epsilon(mechanism: Mechanism) -> float:
    """Return the pure epsilon of `mechanism`; infinity if it has none."""
    if isinstance(mechanism, Gaussian):
        return math.inf
    return 1 / mechanism.noise_multiplier if isinstance(mechanism, Laplace) else mechanism.epsilon


def sampled_epsilon(epsilon: float, rate: float) -> float:
    """Return the amplified pure `epsilon` if each unit takes part with probability `rate` (Poisson)."""
    # log(1 + q (e^eps - 1)), written so that a large epsilon does not overflow.
    if epsilon == math.inf:
        return math.inf
    return epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon))


def _sampled(mechanism: Gaussian, rate: float, a: Array) -> Array:
    # Who takes part by chance is protected at least as well as who always does: the divergence is convex.
    whole, sigma = _whole(mechanism, a), mechanism.noise_multiplier
    if sigma < LEAST_SAMPLED:
        return whole
    found = np.array([_sampled_at(sigma, rate, order) for order in a.tolist()])
    return np.where(np.isfinite(found), np.minimum(found, whole), whole)


@lru_cache(maxsize=1 << 16)
def _sampled_at(sigma: float, rate: float, order: float) -> float:
    """Return the divergence of one sampled use at one order; cached, as every round needs the same ones."""
    from opacus.accountants.analysis.rdp import compute_rdp

    return float(compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=order))


def _whole(mechanism: Mechanism, a: Array) -> Array:
    if isinstance(mechanism, Gaussian):
        return a / mechanism.noise_multiplier / mechanism.noise_multiplier / 2
    if isinstance(mechanism, Laplace):
        b = mechanism.noise_multiplier
        first = np.log(a / (2 * a - 1)) + (a - 1) / b
        second = np.log((a - 1) / (2 * a - 1)) - a / b
        return np.maximum(np.logaddexp(first, second) / (a - 1), 0.0)
    return _pure(mechanism.epsilon, a)


def _pure(epsilon: float, a: Array) -> Array:
    """Return the divergence of randomised response, the worst pure mechanism: p = e^eps / (1 + e^eps) against 1 - p."""
    if epsilon == 0:
        return np.zeros_like(a)
    # log(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)), with log p = -s and log(1-p) = -eps - s.
    s = math.log1p(math.exp(-epsilon))
    found = np.logaddexp((a - 1) * epsilon - s, -a * epsilon - s) / (a - 1)
    return np.minimum(np.maximum(found, 0.0), np.minimum(epsilon, a * np.float64(epsilon) ** 2 / 2))
