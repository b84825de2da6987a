"""What releases tell without an attack, as a run's result holds it and as the report averages it over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitfed.core.grouping import group_pairs
from splitfed.study.report.data import as_json, estimate
from splitfed.study.report.metrics import AMOUNT, FLOORS, UNBOUNDED
from splitfed.study.results import RunResult

KEYS = ("dfil", "least_mse", "mutual_lower", "mutual_upper", "usable", "invertibility", "cka")
"""Measures, in the order of the table."""
BOUNDS = {"invertibility": (-float("inf"), 1.0), "cka": (-1.0, 1.0), "dfil": AMOUNT, "least_mse": AMOUNT}


def information_of(runs: Sequence[RunResult]) -> dict[str, Any] | None:
    """Return measure -> estimate over `runs`, which differ in their seed alone; None where no run was measured.

    With them `best_mse`, the least error of the attacks on inputs in each run, `floor_mse`, that of the floors beside
    them where it is less, and whether one of them is below `least_mse`, `beaten`, as it may be where rows are not as
    the bound has assumed; `why` there is no bound; `empty`: whether dFIL
    alone bounds nothing; and the largest `p_value` of the CKA.
    """
    known = [run.information for run in runs if run.information]
    if not known:
        return None
    values = group_pairs((key, one[key]) for one in known for key in KEYS if one.get(key) is not None)
    found: dict[str, Any] = {
        key: as_json(estimate(values.get(key, []), bounds=BOUNDS.get(key, UNBOUNDED))) for key in KEYS
    }
    best, floor = (as_json(estimate(_least_errors(runs, who), bounds=AMOUNT)) for who in (("attack",), tuple(FLOORS)))
    least = [one["mean"] for one in (best, floor) if one is not None]
    p_values = [one["cka_p_value"] for one in known if one.get("cka_p_value") is not None]
    return {
        **found,
        "best_mse": best,
        "floor_mse": floor if floor is not None and best is not None and floor["mean"] < best["mean"] else None,
        "beaten": bool(least) and found["least_mse"] is not None and min(least) < found["least_mse"]["mean"],
        "p_value": max(p_values, default=None),
        "saturated": any(one.get("saturated") for one in known),
        "empty": any(one.get("empty") for one in known),
        "why": next((one["why"] for one in known if one.get("why")), ""),
    }


def _least_errors(runs: Sequence[RunResult], who: Sequence[str]) -> list[float]:
    """Return the least mean squared error of `who` among the attacks on inputs, of each run that has one."""
    reached = [
        [
            score.mean
            for attack in run.attacks
            if attack.target == "inputs"
            for one in who
            if (score := attack.scores.get("mse", {}).get(one)) and score.mean is not None
        ]
        for run in runs
    ]
    return [min(errors) for errors in reached if errors]
