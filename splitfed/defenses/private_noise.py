"""Noise that carries a promise: drawn in float64, on a grid, so that the last bits of a float give nothing away.

Papers: Mironov, "On significance of the least significant bits for differential privacy", CCS 2012 (what float noise
gives away); Balle, Wang, ICML 2018 and Dwork et al., TCC 2006 (the mechanisms).

A value and its noise are both rounded to multiples of h, a power of two of at most 2^-30 of the noise's scale (of noise
above a thousand sensitivities a smaller one, so that h stays below a millionth of the sensitivity), and added exactly.
So a release is a function of (rounded value + ideal noise) alone, and every value can be answered by the same numbers.
Rounding moves each of d coordinates of two neighbours by at most h towards or from each other: the sensitivity that the
noise is made for is D + h √d in L2, and D + h d in L1, instead of D. The cast to the type of the value comes last and
only processes what was released.

The tails: a Gaussian number is the sum of two draws over √2, which reaches 12 standard deviations (beyond: 1e-32); a
Laplace number is the difference of two exponential ones, each drawn octave by octave, which reaches 73 scales. The
generator is torch's, seeded by the run: no cryptographic one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput

GRID_BITS = 30
"""The grid has at least 2^30 steps to a unit of the noise's scale."""

LARGEST_MULTIPLIER = 2.0**24
"""The most sensitivities that a scale may be: of larger noise no grid is fine enough on which sums are exact."""

_SLACK = 1 + 2.0**-40
"""For the rounding of norms and of the clipped rows, all in float64."""

_BITS = 53
_NARROW = (torch.float16, torch.bfloat16)


def check_precision(name: str, where: str, dtype: torch.dtype) -> None:
    """Refuse noise that promises something, of the defense `name`, on numbers `where` of half precision."""
    if dtype in _NARROW:
        raise InvalidInput(
            f"{name} cannot act on {where} in {str(dtype).removeprefix('torch.')}: half precision is too coarse for "
            "noise that carries a promise; compute there in float32"
        )


def add_gaussian(value: Tensor, sensitivity: float, multiplier: float, size: int, random: torch.Generator) -> Tensor:
    """Return float64 `value` plus Gaussian noise of `multiplier` > 0 standard deviations per unit of L2 sensitivity.

    `sensitivity` > 0: the most that one unit changes its `size` numbers of `value`, in L2.
    """
    step = _grid(sensitivity, multiplier)
    scale = multiplier * (sensitivity * _SLACK + step * math.sqrt(size))
    return _add_on_grid(value, step, lambda: scale * gaussian(value.shape, random))


def add_laplace(value: Tensor, sensitivity: float, multiplier: float, size: int, random: torch.Generator) -> Tensor:
    """Return float64 `value` plus Laplace noise of scale `multiplier` > 0 per unit of L1 sensitivity.

    `sensitivity` > 0: the most that one unit changes its `size` numbers of `value`, in L1.
    """
    step = _grid(sensitivity, multiplier)
    scale = multiplier * (sensitivity * _SLACK + step * size)
    return _add_on_grid(value, step, lambda: scale * laplace(value.shape, random))


def gaussian(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Return standard normal numbers of `shape` in float64, as far as 12 standard deviations."""
    first, second = (torch.randn(shape, generator=random, device=random.device, dtype=torch.float64) for _ in range(2))
    return first.add_(second).mul_(math.sqrt(0.5))


def laplace(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Return Laplace numbers of scale 1 and of `shape` in float64, as far as 73 scales."""
    return _exponential(shape, random) - _exponential(shape, random)


def _exponential(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Draw an exponential number as so many times log 2, by coins, and what is left of the octave it ends in.

    The logarithm of one uniform number would end at 37, in steps as wide as log 2.
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
    """Return the power of two that is at most 2^-30 of the scale, and at most 2^-20 of the sensitivity.

    73 scales are less than 2^53 steps: up to there whole numbers are added exactly.
    """
    if multiplier > LARGEST_MULTIPLIER:
        most = f"expected at most {LARGEST_MULTIPLIER:g}, above which no grid is fine enough"
        raise InvalidInput(f"noise of {multiplier:g} sensitivities is not allowed; {most}")
    finer = max(0, math.frexp(multiplier)[1] - 10)
    return math.ldexp(1.0, math.frexp(multiplier * sensitivity)[1] - 1 - GRID_BITS - finer)


def _add_on_grid(value: Tensor, step: float, noise: Callable[[], Tensor]) -> Tensor:
    # Division by a power of two is exact.
    return ((value / step).round_() + (noise() / step).round_()) * step
