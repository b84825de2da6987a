"""What releases tell without an attack, as a run's result holds it and as the report averages it over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.core.grouping import group_pairs
from splitfed.study.report.data import AMOUNT, Estimate, Json, estimate

KEYS = ("dfil", "least_mse", "mutual_lower", "mutual_upper", "usable", "invertibility", "cka")
"""Measures, in the order of the table."""
BOUNDS = {"invertibility": (-float("inf"), 1.0), "cka": (-1.0, 1.0), "dfil": AMOUNT, "least_mse": AMOUNT}


def information_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return measure -> estimate over `runs`, which differ in their seed alone; None where no run was measured.

    With them `best_mse`, the least error of the attacks on inputs in each run, and whether that is below `least_mse`,
    `beaten`, as it may be where rows are not as the bound has assumed; `why` there is no bound; `empty`: whether dFIL
    alone bounds nothing; and the largest `p_value` of the CKA.
    """
    known = [run["information"] for run in runs if run.get("information")]
    if not known:
        return None
    values = group_pairs((key, one[key]) for one in known for key in KEYS if one.get(key) is not None)
    found: dict[str, Any] = {key: _average(values[key], BOUNDS.get(key)) if key in values else None for key in KEYS}
    errors = [error for run in runs if (error := _least_error(run)) is not None]
    p_values = [one["cka_p_value"] for one in known if one.get("cka_p_value") is not None]
    best = _average(errors, AMOUNT) if errors else None
    return {
        **found,
        "best_mse": best,
        "beaten": best is not None and found["least_mse"] is not None and best["mean"] < found["least_mse"]["mean"],
        "p_value": max(p_values, default=None),
        "saturated": any(one.get("saturated") for one in known),
        "empty": any(one.get("empty") for one in known),
        "why": next((one["why"] for one in known if one.get("why")), ""),
    }


def _average(values: Sequence[float], bounds: tuple[float, float] | None) -> Json | None:
    found: Estimate | None = estimate(values) if bounds is None else estimate(values, bounds=bounds)
    return None if found is None else vars(found)


def _least_error(run: Mapping[str, Any]) -> float | None:
    """Return the least mean squared error of the run's attacks on inputs."""
    reached = [
        attack["scores"]["mse"]["attack"]["mean"]
        for attack in run["attacks"]
        if attack.get("target", "inputs") == "inputs" and attack["scores"].get("mse", {}).get("attack")
    ]
    return min((error for error in reached if error is not None), default=None)
