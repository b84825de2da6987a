"""Noise for privacy guarantees: drawn in float64 on a grid, so that the low-order bits of a float reveal nothing.

Papers: Mironov, "On significance of the least significant bits for differential privacy", CCS 2012 (the leak of
floating-point noise); Balle, Wang, ICML 2018 and Dwork et al., TCC 2006 (the mechanisms).

A value and its noise are both rounded to multiples of h, a power of two of at most 2^-30 of the noise's scale (of noise
above a thousand sensitivities a smaller one, so that h stays below a millionth of the sensitivity), and added exactly.
So a release is a function of (rounded value + ideal noise) alone, and all values have the same set of possible
releases. Rounding changes the difference of two neighbours by at most h in each of d coordinates: the noise is scaled
to the sensitivity D + h √d in L2, or D + h d in L1, instead of D. The final cast to the dtype of the value is
post-processing.

Tails: a Gaussian number is the sum of two draws over √2, which reaches 12 standard deviations (beyond: 1e-32); a
Laplace number is the difference of two exponential ones, each drawn octave by octave, which reaches 73 scales. The
generator is torch's, seeded by the run, and not cryptographic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput

GRID_BITS = 30
"""The grid has at least 2^30 steps in one unit of the noise's scale."""

LARGEST_MULTIPLIER = 2.0**24
"""Largest scale in units of sensitivity: for larger noise no grid is fine enough and has exact sums."""

_SLACK = 1 + 2.0**-40
"""Relative margin for the float64 rounding of norms and of clipped rows."""

_BITS = 53
_NARROW = (torch.float16, torch.bfloat16)


def check_precision(name: str, where: str, dtype: torch.dtype) -> None:
    """Raise `InvalidInput` for private noise, by the defense `name`, on half-precision numbers at `where`."""
    if dtype in _NARROW:
        raise InvalidInput(
            f"{name} cannot act on {where} in {str(dtype).removeprefix('torch.')}: half precision is too coarse for "
            "noise with a privacy guarantee; compute there in float32"
        )


def add_gaussian(value: Tensor, sensitivity: float, multiplier: float, size: int, random: torch.Generator) -> Tensor:
    """Return float64 `value` plus Gaussian noise of `multiplier` > 0 standard deviations per unit of L2 sensitivity.

    `sensitivity` > 0: largest L2 change of the `size` numbers of `value` that belong to one unit of privacy.
    """
    step = _grid(sensitivity, multiplier)
    scale = multiplier * (sensitivity * _SLACK + step * math.sqrt(size))
    return _add_on_grid(value, step, lambda: scale * gaussian(value.shape, random))


def add_laplace(value: Tensor, sensitivity: float, multiplier: float, size: int, random: torch.Generator) -> Tensor:
    """Return float64 `value` plus Laplace noise of scale `multiplier` > 0 per unit of L1 sensitivity.

    `sensitivity` > 0: largest L1 change of the `size` numbers of `value` that belong to one unit of privacy.
    """
    step = _grid(sensitivity, multiplier)
    scale = multiplier * (sensitivity * _SLACK + step * size)
    return _add_on_grid(value, step, lambda: scale * laplace(value.shape, random))


def gaussian(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Return standard normal numbers of `shape` in float64, up to 12 standard deviations."""
    first, second = (torch.randn(shape, generator=random, device=random.device, dtype=torch.float64) for _ in range(2))
    return first.add_(second).mul_(math.sqrt(0.5))


def laplace(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Return Laplace numbers of scale 1 and of `shape` in float64, up to 73 scales."""
    return _exponential(shape, random) - _exponential(shape, random)


def _exponential(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Return exponential numbers, each a geometric number of octaves of log 2 plus the remainder in the last octave.

    The logarithm of one uniform number would be at most 37, in steps of log 2 there.
    """
    first, second = (
        torch.randint(2**_BITS, shape, generator=random, device=random.device, dtype=torch.int64).double()
        for _ in range(2)
    )
    # The zeros that a number of 53 random bits begins with; a second one goes on where it has nothing else.
    zeros = torch.where(first > 0, _BITS - torch.frexp(first).exponent, 2 * _BITS - torch.frexp(second).exponent)
    uniform = torch.rand(shape, generator=random, device=random.device, dtype=torch.float64)
    return math.log(2) * zeros - torch.log1p(-uniform / 2)


def _grid(sensitivity: float, multiplier: float) -> float:
    """Return the largest power of two that is at most 2^-30 of the scale and at most 2^-20 of the sensitivity.

    73 scales are less than 2^53 steps, up to which whole numbers are added exactly.
    """
    if multiplier > LARGEST_MULTIPLIER:
        most = f"expected at most {LARGEST_MULTIPLIER:g}, above which no grid is fine enough"
        raise InvalidInput(f"noise of {multiplier:g} sensitivities is not allowed; {most}")
    finer = max(0, math.frexp(multiplier)[1] - 10)
    return math.ldexp(1.0, math.frexp(multiplier * sensitivity)[1] - 1 - GRID_BITS - finer)


def _add_on_grid(value: Tensor, step: float, noise: Callable[[], Tensor]) -> Tensor:
    # Division by a power of two is exact.
    return ((value / step).round_() + (noise() / step).round_()) * step
