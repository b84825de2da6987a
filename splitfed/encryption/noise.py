"""Noise of CKKS: the error that encryption, rescaling, rotation and the encoding of weights add to a number in a slot.

N/6, in units of the scale, is the standard deviation of the rounding error in a slot after an encryption with a public
key, and after a rescaling: coefficients are rounded to whole numbers, and one of the two polynomials is multiplied by
the secret of -1, 0, 1. Measured over five sets of parameters: 0.164 to 0.169 N. Errors are Laplace, not normal, as the
secret is larger at some roots of unity than at others: of a million, 3467 exceed 4 standard deviations and 180 exceed 6
(3577 and 211 by the Laplace distribution). A stated precision is 16 of them, which one number in seven billion exceeds.

All of this holds for honest ciphertexts and typical keys; it is no bound for every key.

Papers: Cheon, Kim, Kim, Song, "Homomorphic encryption for arithmetic of approximate numbers", ASIACRYPT 2017; Costache,
Curtis, Hales, Murphy, Ogilvie, Player, "On the precision loss in approximate homomorphic encryption", SAC 2023, for
noise as a random variable. The constants are derived and measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

TAIL = 16.0
"""Number of standard deviations of noise in a stated precision."""

_KEY_ERROR = 3.2
"""Standard deviation of the errors in SEAL's keys."""


def rounding_noise(degree: int, scale: float) -> float:
    """Return the standard deviation of the error that an encryption, or a rescaling to `scale`, adds to a number."""
    return degree / 6 / scale


def rotation_noise(degree: int, scale: float) -> float:
    """Return the error that a rotation adds to a number, as a standard deviation of which 16 cover the worst slot.

    SEAL multiplies the errors of a key with residues in [0, q), of mean q/2: a polynomial whose largest value, N q/pi,
    is at the root of unity next to 1. A few slots therefore have errors up to a hundred times those of the others:
    normal, with a standard deviation of 3.2 sqrt(N/2) N/pi in units of the scale. Five of these are allowed for.
    """
    others = 1.5 * _KEY_ERROR**2 + 1
    worst = 5 / TAIL * 6 * _KEY_ERROR * math.sqrt(degree / 2) / math.pi
    return rounding_noise(degree, scale) * math.sqrt(others + worst**2)


def scalar_noise(features: int, bound: float, scale: float) -> float:
    """Return the standard deviation that rounded weights, one for all slots each, add to a sum of `features` products.

    `bound`: largest magnitude that a weight is multiplied with; `scale`: the scale at which weights are encoded.
    """
    return math.sqrt(features) * bound / scale


def vector_noise(degree: int, features: int, bound: float, scale: float) -> float:
    """Return the standard deviation that rounded weights add to a sum of products if they differ from slot to slot."""
    return math.sqrt(features * degree / 24) * bound / scale


def accumulate_noise(fresh: float, factors: Iterable[float], added: float) -> float:
    """Return the largest noise after multiplications by `factors`, in any order, each of which adds `added`.

    Squaring numbers of magnitude b multiplies noise by 2b, a linear layer by at most the Euclidean norm of a row of
    weights. Later factors multiply the noise added before, so the largest factor is taken as the last.
    """
    variance = fresh**2
    for factor in sorted(factors):
        variance = factor**2 * variance + added**2
    return math.sqrt(variance)


def baby_steps(results: int) -> int:
    """Return the number of baby steps of a layer of packed rows, the unrotated input included.

    `results`: a power of two. As many giant steps, or half as many, follow the products.
    """
    return 1 << (results.bit_length() // 2)
