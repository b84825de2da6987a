"""How many clients are meant: a whole number of them, or a fraction of those there are."""

from __future__ import annotations

import math
from numbers import Integral, Real

from splitfed.core.errors import check_count, check_number


def part_of(wanted: int | float, count: int) -> int:
    """Return how many of `count` clients are `wanted`; a fraction is rounded up, to one at least."""
    return int(wanted) if is_count(wanted) else max(1, math.ceil(wanted * count - 1e-9))


def check_part(name: str, value: object) -> None:
    """Refuse what is neither a whole number >= 1 nor a fraction in (0, 1]; None passes."""
    if isinstance(value, Real) and not isinstance(value, Integral):
        check_number(f"{name} (a fraction)", float(value), low=0.0, high=1.0, open_low=True)
    elif value is not None:
        check_count(name, value, low=1)


def is_count(value: object) -> bool:
    """Tell a number of clients from a share of them."""
    return isinstance(value, Integral)
