"""An oracle: composition of unsampled mechanisms by the distribution of their privacy loss, on a grid of our own.

Paper: Koskela, Jälkö, Honkela, "Computing tight differential privacy guarantees using FFT", AISTATS 2020; Meiser,
Mohammadi, "Tight on budget? Tight bounds for r-fold approximate differential privacy", CCS 2018.

For mechanisms whose loss is the same in both directions: Gaussian, Laplace, and randomised response
as the worst pure one. Every loss is rounded up to the grid, what lies above it counts as lost for good, and what wraps
round the grid from below only adds; what wraps from above is bounded by the Rényi divergences, and added too. So the
epsilon returned is an upper bound, up to the rounding of floating point (about 1e-12 in delta).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, rfft
from scipy.special import ndtr

from splitfed.core.privacy_events import Gaussian, Laplace, Mechanism

Floats = npt.NDArray[np.float64]

POINTS = 1 << 18
_TAIL = 1e-6  # the part of delta that may wrap round from above


def loss_epsilon(uses: Sequence[tuple[Mechanism, int]], delta: float, reach: float) -> float:
    """Return an epsilon >= 0 that `uses`, mechanisms with how often each is used, keep at `delta`.

    `reach`: an epsilon that they keep at `delta` times 1e-6, by any other accountant; the grid
    goes one beyond it.
    """
    top = reach + 1.0
    step = 2 * top / POINTS
    spectrum: npt.NDArray[np.complex128] | None = None
    mass = 1.0
    for mechanism, times in uses:
        chances = _grid(mechanism, step)
        mass *= float(chances.sum()) ** times
        power = rfft(chances) ** times
        spectrum = power if spectrum is None else spectrum * power
    assert spectrum is not None
    total = np.clip(irfft(spectrum, POINTS), 0.0, None)
    losses: Floats = step * np.arange(1, POINTS // 2, dtype=np.float64)
    chances = total[1 : POINTS // 2]
    # The loss exceeds `top` with a chance of at most that delta over 1 - exp(-1).
    spare = delta - max(0.0, 1.0 - mass) - delta * _TAIL / (1 - np.exp(-1.0))
    return _smallest_epsilon(losses, chances, spare)


def _smallest_epsilon(losses: Floats, chances: Floats, delta: float) -> float:
    """Return the smallest grid point e with sum over losses > e of chance (1 - exp(e - loss)) <= delta, or inf."""
    # Sums from above, so that every point costs nothing: sum p and sum p exp(-loss).
    mass = np.append(np.cumsum(chances[::-1])[::-1], 0.0)
    weighted = np.append(np.cumsum((chances * np.exp(-losses))[::-1])[::-1], 0.0)
    points = np.append(0.0, losses)
    excess = mass - np.exp(points) * weighted
    fine = np.nonzero(excess <= delta)[0]
    return float(points[fine[0]]) if len(fine) else float("inf")


def _grid(mechanism: Mechanism, step: float) -> Floats:
    """Return the chance of every loss k step, (POINTS,), negative k at the end; losses are rounded up to it."""
    half = POINTS // 2
    edges: Floats = step * np.arange(-half, half, dtype=np.float64)
    chances = np.diff(_loss_cdf(mechanism, edges), prepend=0.0)
    return np.roll(chances, -half)


def _loss_cdf(mechanism: Mechanism, loss: Floats) -> Floats:
    """Return the chance that the loss of one use is at most `loss`."""
    found: Floats
    if isinstance(mechanism, Gaussian):
        sigma = mechanism.noise_multiplier
        found = ndtr(sigma * (loss - 0.5 / sigma**2))
        return found
    if isinstance(mechanism, Laplace):
        most = 1 / mechanism.noise_multiplier
        inside = 0.5 * np.exp((np.minimum(loss, most) - most) / 2)
        found = np.where(loss >= most, 1.0, np.where(loss >= -most, inside, 0.0))
        return found
    most = mechanism.epsilon
    found = np.where(loss >= most, 1.0, np.where(loss >= -most, 1 / (1 + np.exp(most)), 0.0))
    return found
