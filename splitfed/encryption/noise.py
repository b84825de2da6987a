"""Noise of CKKS: what encryption, rescaling, rotation and the encoding of weights add to a number in a slot.

N/6, in units of the scale, is the standard deviation of what rounding leaves in a slot after an encryption with a
public key, and after a rescaling: coefficients are rounded to whole numbers, and one of the two polynomials is
multiplied by the secret of -1, 0, 1. Measured over five sets of parameters: 0.164 to 0.169 N. Errors follow Laplace's
law, not the normal one, as the secret is larger at some roots of unity than at others: of a million, 3467 exceed 4
standard deviations and 180 exceed 6 (3577 and 211 by that law). A stated precision is 16 of them, which one number in
seven billion exceeds.

All of this holds for honest ciphertexts and typical keys; it is no proof for every key.

Papers: Cheon, Kim, Kim, Song, "Homomorphic encryption for arithmetic of approximate numbers", ASIACRYPT 2017; Costache,
Curtis, Hales, Murphy, Ogilvie, Player, "On the precision loss in approximate homomorphic encryption", SAC 2023, for
noise as a random variable. The constants are derived and measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

TAIL = 16.0
"""Standard deviations of noise that a stated precision allows for."""

_KEY_ERROR = 3.2
"""Standard deviation of the errors in SEAL's keys."""


def rounding_noise(degree: int, scale: float) -> float:
    """Return the standard deviation of what an encryption, or a rescaling to `scale`, adds to a number."""
    return degree / 6 / scale


def rotation_noise(degree: int, scale: float) -> float:
    """Return what a rotation adds to a number, as a standard deviation of which 16 cover the worst slot.

    SEAL multiplies the errors of a key with residues in [0, q), of mean q/2: a polynomial that is largest, N q/pi,
    at the root of unity next to 1. A few slots therefore have errors up to a hundred times those of the others: normal
    ones, with a standard deviation of 3.2 sqrt(N/2) N/pi in units of the scale. Five of these are allowed for.
    """
    others = 1.5 * _KEY_ERROR**2 + 1
    worst = 5 / TAIL * 6 * _KEY_ERROR * math.sqrt(degree / 2) / math.pi
    return rounding_noise(degree, scale) * math.sqrt(others + worst**2)


def scalar_noise(features: int, bound: float, scale: float) -> float:
    """Return what rounding the weights adds to a sum of `features` products, each weight one number for all slots.

    `bound`: largest magnitude that a weight is multiplied with; `scale`: at which weights are encoded.
    """
    return math.sqrt(features) * bound / scale


def vector_noise(degree: int, features: int, bound: float, scale: float) -> float:
    """Return what rounding the weights adds to such a sum where weights differ from slot to slot, as a deviation."""
    return math.sqrt(features * degree / 24) * bound / scale


def accumulate_noise(fresh: float, factors: Iterable[float], added: float) -> float:
    """Return the largest noise after multiplications that enlarge it by `factors`, in any order, and add `added` each.

    Squaring numbers of magnitude b enlarges it by 2b, a linear layer by the Euclidean norm of a row of weights at most.
    Late factors enlarge what was added before, so that the largest one counts last.
    """
    variance = fresh**2
    for factor in sorted(factors):
        variance = factor**2 * variance + added**2
    return math.sqrt(variance)


def baby_steps(results: int) -> int:
    """Return how many rotated copies of its input, the input itself included, a layer of packed rows is made of.

    `results`: a power of two. As many giant steps, or half of them, follow after the products.
    """
    return 1 << (results.bit_length() // 2)
