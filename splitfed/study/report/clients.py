"""What a study's runs say of their clients one by one: how far they lie apart, further scores, rounds to a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from splitfed.study.report.data import AMOUNT, Estimate, bounds_of, estimate

Json = dict[str, Any]
RunResults = Sequence[Mapping[str, Any]]
SPREAD = ("mean", "min", "max", "std", "worst_decile")


def clients_of(runs: RunResults) -> Json | None:
    """Return what `runs`, that differ in their seed alone, say of several clients, as estimates; None with one client.

    `spread`: mean, min, max, std and worst_decile of the clients' test scores on their own rows; `method`: further
    scores of the method, the mean over clients; `across`: the same of every client's model on its own rows, on the
    others' and on all.
    """
    spreads = [run["utility"].get("spread") for run in runs]
    if not any(spreads):
        return None
    known, bounds = [one or {} for one in spreads], bounds_of(runs)
    return {
        "spread": {
            key: _estimate_to_json(estimate([one.get(key) for one in known], bounds=AMOUNT if key == "std" else bounds))
            for key in SPREAD
        },
        "method": _mean_scores([run["utility"].get("method") or {} for run in runs], bounds),
        "across": _mean_scores([run["utility"].get("across") or {} for run in runs], bounds),
    }


def target_of(runs: RunResults) -> Json | None:
    """Return how many of `runs` reached the study's target, after how many rounds and bytes; None without a target."""
    targets = [run["target"] for run in runs if run.get("target")]
    if not targets:
        return None
    reached = [one for one in targets if one["rounds"] is not None]
    return {
        "value": targets[0]["value"],
        "reached": len(reached),
        "of": len(targets),
        "rounds": _estimate_to_json(estimate([one["rounds"] for one in reached], bounds=AMOUNT)),
        "bytes": _estimate_to_json(estimate([one["bytes"] for one in reached], bounds=AMOUNT)),
    }


def _mean_scores(further: Sequence[Mapping[str, Any]], bounds: tuple[float, float]) -> Json:
    names = dict.fromkeys(name for one in further for name in one)
    each = {name: [(one.get(name) or {}).get("mean") for one in further] for name in names}
    return {name: _estimate_to_json(estimate(values, bounds=bounds)) for name, values in each.items()}


def _estimate_to_json(found: Estimate | None) -> Json | None:
    return None if found is None else asdict(found)
