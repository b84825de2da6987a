"""What a reader of a run's scores must not miss: a model of no use, and guesses that are the wrong way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitfed.study.report_data import METRICS
from splitfed.utility import ConstantAnswer, below_constant

Json = Mapping[str, Any]


def remarks(found: Json) -> list[str]:
    """Return what is to be said beside the scores of the result `found`, in clauses; nothing of a run that failed."""
    if "utility" not in found:
        return []
    return [*_useless(found), *(said for attack in found["attacks"] for said in reversals(attack))]


def reversals(attack: Json) -> list[str]:
    """Return a clause for every metric in which `attack`, as a result holds it, is measurably the wrong way round."""
    said = []
    for metric, who in attack["scores"].items():
        known = METRICS.get(metric)
        if known is None or known.centre is None or "guess" not in who:
            continue
        guess = who["guess"]
        bound = guess["mean"] if guess.get("high") is None else guess["high"]
        if bound is not None and bound < known.centre:
            leak = known.leak(guess["mean"])
            said.append(
                f"{attack['label']} is reversed: {known.title} {guess['mean']:.3g} leaks as much as {leak:.3g} does"
            )
    return said


def _useless(found: Json) -> list[str]:
    told = found["utility"]
    if found.get("intruder") or not told.get("constant") or told["test"] is None:
        return []
    said = below_constant(told["metric"], told["test"], ConstantAnswer(**told["constant"]), told["higher_is_better"])
    return [said] if said else []
