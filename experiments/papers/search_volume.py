"""Hypervolume: the share of a box that a set of points dominates.

Paper: Zitzler and Thiele, "Multiobjective optimization using evolutionary algorithms: a comparative case study", PPSN
1998. Exact, by slices along the last objective.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Point = Sequence[float]


def volume(points: Sequence[Point], reference: Point) -> float:
    """Return the volume between `points`, all to be minimized, and the `reference`, which they must stay below.

    A point that is not below the reference in every objective adds nothing.
    """
    inside = [p for p in points if all(a < r for a, r in zip(p, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return float(reference[0] - min(p[0] for p in inside))
    heights = [*sorted({p[-1] for p in inside}), reference[-1]]
    return sum(
        (above - below) * volume([p[:-1] for p in inside if p[-1] <= below], reference[:-1])
        for below, above in itertools.pairwise(heights)
    )


def front(points: Sequence[Point]) -> list[int]:
    """Return the places of the points, all to be minimized, that no other dominates; of equal ones the first."""
    kept = {tuple(p): i for i, p in reversed(list(enumerate(points)))}
    return sorted(
        i for p, i in kept.items() if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in kept)
    )
