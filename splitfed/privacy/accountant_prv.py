"""Composition of sampled Gaussians by privacy loss random variables, as in Opacus, on a grid of bounded size.

Paper: Gopi, Lee, Wutschitz, "Numerical composition of differential privacy", NeurIPS 2021.

Whether the method applies is decided from the parameters, before composing. The grid spans the epsilon that Rényi
divergences give at a small part of delta, in steps that become finer with the number of uses; so a large epsilon or
very many uses would take minutes and gigabytes for a figure of no practical use. The Fourier transform has double
precision, so a delta below its rounding over the whole grid is not resolved.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np

from splitfed.core.errors import first_line
from splitfed.core.privacy_events import Event, Gaussian
from splitfed.privacy.accountant_pld import MOST_REACH
from splitfed.privacy.accountant_rdp import SAMPLED_ORDERS, renyi, renyi_epsilon

POINTS = 1 << 22
"""Maximum size of the grid: a few seconds on one core."""

EPSILON_ERROR = 0.01
DELTA_ERROR = 1e-3  # of delta, as Opacus has it
_ORDERS = tuple(order for order in SAMPLED_ORDERS if order < 64)  # those of Opacus, which decide on the grid

NAME = "privacy loss variables (Gopi et al. 2021)"


def prv_epsilon(uses: Sequence[tuple[Event, int]], delta: float) -> float | str:
    """Return the epsilon at `delta` of `uses`, Gaussian events with sampling rates < 1 and their counts.

    If the method does not apply, the reason as a clause: "the ... do not resolve delta 1e-14".
    """
    obstacle = _obstacle(uses, delta)
    if obstacle is not None:
        return obstacle
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [
        (e.mechanism.noise_multiplier, e.sampling_rate, n) for e, n in uses if isinstance(e.mechanism, Gaussian)
    ]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            # Opacus returns the upper end of what the numerical error allows.
            epsilon = float(
                accountant.get_epsilon(delta=delta, eps_error=EPSILON_ERROR, delta_error=DELTA_ERROR * delta)
            )
        except (ArithmeticError, ValueError, RuntimeError, IndexError) as error:
            return f"privacy loss variables do not resolve it ({first_line(error)})"
    return max(0.0, epsilon) if math.isfinite(epsilon) else "privacy loss variables do not resolve it"


def _obstacle(uses: Sequence[tuple[Event, int]], delta: float) -> str | None:
    """Return the reason why the method does not apply, as a clause; None if it applies."""
    times = sum(n for _, n in uses)
    with np.errstate(over="ignore"):
        total = np.sum([n * renyi(event, _ORDERS) for event, n in uses], axis=0)
    reach, _ = renyi_epsilon(_ORDERS, total, delta * DELTA_ERROR / 4)
    for event, _ in uses:
        once, _ = renyi_epsilon(_ORDERS, renyi(event, _ORDERS), delta * DELTA_ERROR / (8 * times))
        reach = max(reach, once)
    if not reach <= MOST_REACH:
        return f"privacy loss variables would reach epsilon {reach:.3g}, and end at {MOST_REACH:g}"
    mesh = EPSILON_ERROR / math.sqrt(times * math.log(12 / (DELTA_ERROR * delta)) / 2)
    points = 2 * (reach + 3) / mesh
    if delta * (1 - DELTA_ERROR) <= float(np.finfo(np.float64).eps) * points:
        return f"privacy loss variables do not resolve delta {delta:g}"
    if points > POINTS:
        return f"privacy loss variables would take a grid of {points:.2g} points, and end at {POINTS:.2g}"
    return None
