"""What float32 leaves of a number that was worked out by hand, whichever processor computes it."""

from __future__ import annotations

from typing import Any

import pytest

UNIT = 2.0**-24
"""The largest relative error of one float32 rounding."""


def single(expected: Any, size: float = 4.0, roundings: int = 64) -> Any:
    """Compare with `expected` as float32 finds it after `roundings` operations on numbers of up to `size`.

    How often a value is rounded depends on the processor: one multiplies and adds in one operation, another in two,
    and each sums in an order of its own. `size` counts, because a small difference of numbers has their error.
    """
    error = roundings * UNIT
    return pytest.approx(expected, rel=error, abs=error * size)
