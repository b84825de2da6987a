"""Budgets of attacks: how much work an attack may take, by name, and how work is doubled until it gains nothing.

"fast" is a quick look of seconds, "paper" has the authors' settings, and "default", where it was measured, is that at
which twice the time gains next to nothing. The strongest attacks call theirs "quick", "standard" and "full", too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from splitfed.attacks.selection import CONVERGED, gain_of

# Name of a budget -> the parameters that it sets.
Budgets = Mapping[str, Mapping[str, Any]]


def usual_budget(budgets: Budgets) -> str:
    """Return the budget that is meant where none is named: "default", or "fast" where there is no such budget."""
    return "default" if "default" in budgets else "fast"


def quick_look(budgets: Budgets, budget: str) -> bool:
    """Return whether `budget` is "fast" with other settings than "paper", so that a longer attack may find more."""
    return budget == "fast" and budgets["fast"] != budgets["paper"]


def name_budgets(
    quick: Mapping[str, Any], standard: Mapping[str, Any], full: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return budgets by both their names: "fast", "default" and "paper" are "quick", "standard" and "full"."""
    return {"fast": quick, "default": standard, "paper": full, "quick": quick, "standard": standard, "full": full}


def double_work(
    metric: str, size: int, doublings: int, attempt: Callable[[int], float], before: float | None = None
) -> None:
    """Call `attempt(size)`, and with twice the size as long as that gains what `CONVERGED` says of `metric`.

    At most `doublings` times, and never where the error that `attempt` returns is NaN: nothing judges then. `before`:
    the error at `size`, where that was tried already.
    """
    before = attempt(size) if before is None else before
    for doubling in range(1, doublings + 1):
        if math.isnan(before):
            return
        after = attempt(size * 2**doubling)
        if gain_of(metric, before, after) < CONVERGED[metric]:
            return
        before = after
