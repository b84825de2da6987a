"""Choice of parameters for a model: the cheapest preset of sufficient depth, slots, magnitude and precision.

Noise is added up by the formulas that every ciphertext carries, so that a run does not exceed the planned error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitfed.core.errors import InvalidInput, check_count, unknown
from splitfed.encryption.ciphertexts import BATCH, ROWS, next_power_of_two
from splitfed.encryption.noise import (
    TAIL,
    accumulate_noise,
    baby_steps,
    rotation_noise,
    scalar_noise,
    vector_noise,
)
from splitfed.encryption.parameters import PRESETS, CkksParameters


def choose_parameters(
    *,
    depth: int,
    precision: float,
    rows: int = 1,
    features: int = 1,
    results: int = 1,
    largest: float = 1.0,
    gain: float = 1.0,
    squares: int = 0,
    encrypted_weights: bool = False,
    layout: str = BATCH,
) -> CkksParameters:
    """Return the cheapest preset that suffices, by bytes of a fresh ciphertext.

    `depth`: multiplications in sequence (a linear layer is one, a square another), >= 0. `precision`: largest accepted
    error of a result, > 0. `rows`: rows of a batch, >= 1. `features`, `results`: of the widest linear layer, >= 1.
    `largest`: largest magnitude of any input, result or encrypted weight, > 0. `gain`: largest Euclidean norm of a row
    of weights, by which a layer multiplies errors, > 0; unused if weights are encrypted. `squares`: how many of the
    multiplications are squares. `encrypted_weights`: True if weights are encrypted as well. `layout`: "batch" or
    "rows". Raises `InvalidInput` if no preset suffices.
    """
    check_count("depth", depth)
    check_count("squares", squares)
    for name, count in (("rows", rows), ("features", features), ("results", results)):
        check_count(name, count, low=1)
    for name, value in (("precision", precision), ("largest", largest), ("gain", gain)):
        if not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise InvalidInput(f"{name}={value!r} is not allowed; expected a finite number above 0")
    if layout not in (BATCH, ROWS):
        raise unknown("layout", layout, (BATCH, ROWS))
    if squares > depth:
        raise InvalidInput(f"squares={squares} is not allowed; expected no more than depth={depth} multiplications")
    if layout == ROWS and (depth - squares > 1 or encrypted_weights):
        raise InvalidInput("the layout 'rows' holds one linear layer, with weights in plain; plan for 'batch'")
    exact = [p for p in PRESETS.values() if not p.is_lossy]
    deep = [p for p in exact if p.depth >= depth]
    if not deep:
        deepest = max(p.depth for p in exact)
        raise InvalidInput(f"depth={depth} is too deep: the scale is exhausted after {deepest} multiplications")
    width = next_power_of_two(max(features, results))
    needed, what = (rows, f"rows={rows}") if layout == BATCH else (width, f"features={features}, results={results}")
    wide = [p for p in deep if p.slots >= needed]
    if not wide:
        slots = max(p.slots for p in deep)
        advice = "; use smaller batches" if layout == BATCH else ""
        raise InvalidInput(f"{what} do not fit: a ciphertext has {slots} slots at most{advice}")
    large = [p for p in wide if p.largest >= largest]
    if not large:
        limit = max(p.largest for p in wide)
        raise InvalidInput(
            f"largest={largest:g} is beyond the scale: at depth {depth} a number may have magnitude {limit:g} at most"
        )

    # Products of ciphertexts a and b with errors e and f have errors a f and b e, independent of each other.
    layer = math.sqrt(2 * features) * largest if encrypted_weights else gain
    factors = [layer] * (depth - squares) + [2 * largest] * squares
    errors = [_largest_error(p, layout, features, results, largest, factors) for p in large]
    fine = [p for p, error in zip(large, errors, strict=True) if error <= precision]
    if not fine:
        best = min(errors)
        raise InvalidInput(f"precision={precision:g} is too fine: at depth {depth} the smallest error is {best:.1e}")
    return min(fine, key=lambda p: (p.ciphertext_bytes[-1], p.degree))


def _largest_error(
    p: CkksParameters, layout: str, features: int, results: int, largest: float, factors: Sequence[float]
) -> float:
    """Return the error of a result that is hardly ever exceeded; `factors`: growth of errors by each multiplication.

    The other arguments are those of `choose_parameters`.
    """
    scale = 2.0**p.scale_bits
    fresh, encoding = p.noise, scalar_noise(features, largest, scale)
    if layout == ROWS:
        steps = baby_steps(next_power_of_two(results)) - 1
        fresh = math.hypot(fresh, math.sqrt(steps) * rotation_noise(p.degree, scale))
        encoding = vector_noise(p.degree, next_power_of_two(max(features, results)), largest, scale)
    return TAIL * accumulate_noise(fresh, factors, math.hypot(p.noise, encoding))
