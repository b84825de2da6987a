"""The Pareto front of utility against leakage: the settings that no other setting beats on both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitfed.core.errors import InvalidInput


def pareto_front(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Return the positions of the `points` (utility, leakage) on the front, by rising leakage, then position.

    More utility is better, less leakage is better. A point is on the front unless some other point has at least
    its utility and at most its leakage, and is strictly better in one of the two; equal points stay together.
    Raises `InvalidInput` for a coordinate that is not a number.
    """
    for position, point in enumerate(points):
        if any(math.isnan(value) for value in point):
            raise InvalidInput(f"point {position} is {point}; expected two numbers")
    front = [
        position
        for position, (utility, leakage) in enumerate(points)
        if not any(
            other >= utility and less <= leakage and (other > utility or less < leakage) for other, less in points
        )
    ]
    return tuple(sorted(front, key=lambda position: (points[position][1], position)))
