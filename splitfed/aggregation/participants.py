"""Number of participating clients, given as a whole number or as a fraction of all clients."""

from __future__ import annotations

import math
from numbers import Integral, Real

from splitfed.core.errors import check_count, check_number


def part_of(wanted: int | float, count: int) -> int:
    """Return `wanted` as a number of clients: a fraction of `count` is rounded up, to at least one."""
    return int(wanted) if is_count(wanted) else max(1, math.ceil(wanted * count - 1e-9))


def check_part(name: str, value: object) -> None:
    """Raise `InvalidInput` unless `value` is None, a whole number >= 1 or a fraction in (0, 1]."""
    if isinstance(value, Real) and not isinstance(value, Integral):
        check_number(f"{name} (a fraction)", float(value), low=0.0, high=1.0, open_low=True)
    elif value is not None:
        check_count(name, value, low=1)


def is_count(value: object) -> bool:
    """Return whether `value` is a number of clients rather than a fraction of them."""
    return isinstance(value, Integral)
