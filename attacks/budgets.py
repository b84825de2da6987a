"""Budgets: named parameter sets that fix the work of an attack, and the doubling of work until it gains little.

"quick" is a quick look of seconds, "full" has the authors' settings (of the strongest attacks, which have no authors,
the longest run), and "standard", where measured, is the budget at which doubling the time gains next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from splitfed.attacks.selection import CONVERGED, gain_of

# Name of a budget -> the parameters that it sets.
Budgets = Mapping[str, Mapping[str, Any]]


def quick_look(budgets: Budgets, budget: str) -> bool:
    """Return whether `budget` is "quick" and differs from "full", so that a longer attack may predict better."""
    return budget == "quick" and budgets["quick"] != budgets["full"]


def double_work(
    metric: str, size: int, doublings: int, attempt: Callable[[int], float], before: float | None = None
) -> None:
    """Call `attempt(size)`, then with doubled sizes as long as each doubling gains at least `CONVERGED[metric]`.

    At most `doublings` times, and never after `attempt` returned a NaN error, which means that no rows judge it.
    `before`: the error at `size`, if that was tried already.
    """
    before = attempt(size) if before is None else before
    for doubling in range(1, doublings + 1):
        if math.isnan(before):
            return
        after = attempt(size * 2**doubling)
        if gain_of(metric, before, after) < CONVERGED[metric]:
            return
        before = after
