"""Budgets: named parameter sets that fix the work of an attack, and the doubling of work until it gains little.

"fast" is a quick look of seconds, "paper" has the authors' settings, and "default", where measured, is the budget at
which doubling the time gains next to nothing. The strongest attacks also accept "quick", "standard" and "full".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from splitfed.attacks.selection import CONVERGED, gain_of

# Name of a budget -> the parameters that it sets.
Budgets = Mapping[str, Mapping[str, Any]]


def usual_budget(budgets: Budgets) -> str:
    """Return the name of the default budget: "default" if it is in `budgets`, else "fast"."""
    return "default" if "default" in budgets else "fast"


def quick_look(budgets: Budgets, budget: str) -> bool:
    """Return whether `budget` is "fast" and differs from "paper", so that a longer attack may predict better."""
    return budget == "fast" and budgets["fast"] != budgets["paper"]


def name_budgets(
    quick: Mapping[str, Any], standard: Mapping[str, Any], full: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the budgets under both names: "fast", "default", "paper", and "quick", "standard", "full"."""
    return {"fast": quick, "default": standard, "paper": full, "quick": quick, "standard": standard, "full": full}


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
