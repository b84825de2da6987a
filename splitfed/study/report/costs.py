"""What a study's runs cost, for its report: predicted against counted, who took part, accuracy by simulated time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from splitfed.costs.singh import Crossover, Sizes, over_clients
from splitfed.study.config.run_spec import COMPUTATION
from splitfed.study.report.data import Json, Setting, by_round, scored_utility, shared_rounds
from splitfed.study.results import RunResult

Runs = Sequence[RunResult]
Line = tuple[list[float], list[float]]  # seconds, utilities


def costs_of(runs: Runs) -> Json | None:
    """Return what was predicted for `runs`, means over seeds, and whether every run counted just that.

    None where a run has no prediction.
    """
    predicted = [one for run in runs if (one := run.predicted)]
    if not predicted or len(predicted) < len(runs):
        return None
    kinds = dict.fromkeys(kind for one in predicted for kind in one["bytes_by_kind"])
    return {
        "bytes": fmean(one["bytes"] for one in predicted),
        "bytes_by_kind": {kind: fmean(one["bytes_by_kind"].get(kind, 0) for one in predicted) for kind in kinds},
        "messages": fmean(one["messages"] for one in predicted),
        "flops": {role: fmean(n for one in predicted for n in one["flops"][role]) for role in predicted[0]["flops"]},
        "memory": {role: m["total"] for role, m in predicted[0]["memory"].items()},
        "agrees": all(_matches_prediction(run) for run in runs),
        "at_most": next((one["at_most"] for one in predicted if one.get("at_most")), None),
    }


def participation(runs: Runs) -> Json | None:
    """Return which clients took part, over all seeds; None if all finished every round, or no run recorded it.

    `noted` has a line for every round in which a client dropped out or the quorum was missed.
    """
    entries = [entry for run in runs for entry in run.history if "dropped" in entry]
    if not entries:
        return None
    asked = [entry["clients"] for entry in entries]
    summary = {
        "rounds": len(entries),
        "clients": runs[0].clients,
        "asked": fmean(asked),
        "dropped": sum(len(entry["dropped"]) for entry in entries),
        "missed": sum(not entry["averaged"] for entry in entries),
        "noted": [said for run in runs for entry in run.history if (said := _participation_note(run.seed, entry))],
    }
    return summary if summary["dropped"] or summary["missed"] or min(asked) < runs[0].clients else None


def utility_over_time(setting: Setting) -> tuple[Line, list[Line]] | None:
    """Return the utility against simulated seconds: the mean over seeds, and every seed; None without a clock.

    A point is a round that was scored in every seed; its time is the mean over seeds as well.
    """
    each = [by_round(run.history, _score_and_time) for run in setting.runs]
    if not (shared := shared_rounds(each)):
        return None
    mean = (
        [fmean(rounds[number][0] for rounds in each) for number in shared],
        [fmean(rounds[number][1] for rounds in each) for number in shared],
    )
    return mean, [([t for t, _ in rounds.values()], [v for _, v in rounds.values()]) for rounds in each]


def crossovers(settings: Sequence[Setting]) -> dict[str, Crossover]:
    """Return topology -> bytes by number of clients, for runs the formulas are about, with more than one client."""
    found: dict[str, Crossover] = {}
    for setting in settings:
        run = setting.runs[0]
        if setting.topology not in found and run.sizes and run.clients > 1:
            sizes = Sizes(**run.sizes)
            top = math.log10(2 * max(over_clients(sizes, [1]).threshold, sizes.clients))
            values = sorted({round(10 ** (top * i / 24)) for i in range(25)})
            found[setting.topology] = over_clients(sizes, values)
    return found


def _matches_prediction(run: RunResult) -> bool:
    predicted, kinds = run.predicted or {}, run.bytes_by_kind
    if predicted.get("at_most"):
        return all(n <= predicted["bytes_by_kind"].get(kind, 0) for kind, n in kinds.items())
    if predicted.get(COMPUTATION):
        # How well ciphertexts are compressed is known within 1 %.
        near = all(math.isclose(n, predicted["bytes_by_kind"].get(kind, 0), rel_tol=0.01) for kind, n in kinds.items())
        return bool(near and predicted["messages"] == run.messages)
    return bool(predicted["bytes_by_kind"] == kinds and predicted["messages"] == run.messages)


def _participation_note(seed: int, entry: Mapping[str, Any]) -> str:
    gone = ", ".join(map(str, entry.get("dropped", [])))
    said = [*([f"client {gone} dropped out"] if gone else []), *([] if entry.get("averaged", True) else ["no quorum"])]
    return f"seed {seed}, round {entry['round'] + 1}: {'; '.join(said)}" if said else ""


def _score_and_time(entry: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return simulated seconds and utility after a round."""
    seconds, value = entry.get("simulated_seconds"), scored_utility(entry)
    return None if value is None or seconds is None else (float(seconds), value)
