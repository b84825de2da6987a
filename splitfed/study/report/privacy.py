"""What the runs of a study promise in privacy: before training from planned uses, and in a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitfed.core.defense import Accounted
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs, nest
from splitfed.privacy.ledger import describe_ledger
from splitfed.study.config import build
from splitfed.study.config.callback_tables import make_callbacks
from splitfed.study.config.run_spec import RunSpec
from splitfed.study.report.data import Json
from splitfed.study.results import RunResult
from splitfed.training.run_plan import RunPlan
from splitfed.training.settings import Evaluation, Logging


def plan_ledger(cell: RunSpec, builder: build.StudyBuilder) -> Json | None:
    """Return the privacy ledger that the run `cell` will have; None where none of its defenses promises anything."""
    if not any(isinstance(defense, Accounted) for defense in build.defenses(cell)):
        return None
    ready, plan = builder.prepare(cell, defended=True), cell.training
    evaluation = Evaluation(plan.evaluate_every, delta=plan.delta)
    logging = Logging(callbacks=make_callbacks(cell.callbacks, Path("run")))
    return RunPlan(ready, plan.rounds, evaluation=evaluation, logging=logging).ledger.as_dict()


def plan_ledgers(cells: Sequence[RunSpec], builder: build.StudyBuilder) -> list[Json]:
    """Return the planned ledger of every run of `cells` that promises something, or why it refuses."""
    found: list[Json] = []
    for cell in cells:
        who = {**place_of(cell), "defense": cell.defense.label}
        try:
            if (ledger := plan_ledger(cell, builder)) is not None:
                found.append({**who, "refused": None, "ledger": ledger})
        except InvalidInput as error:
            found.append({**who, "refused": str(error), "ledger": None})
    return found


def place_of(cell: RunSpec) -> dict[str, str]:
    """Return the labels of `cell`, of its topology and of what it has on that."""
    return {key: label for key, label in cell.labels.items() if label != "none"}


def privacy_of(runs: Sequence[RunResult]) -> Json | None:
    """Return what a setting promises, for its report: the ledger of the seed that it costs most.

    `agrees`: whether every run has the ledger that was planned. None where nothing is promised.
    """
    if not (ledgers := [run.privacy for run in runs if run.privacy]):
        return None
    worst = max(ledgers, key=lambda one: max(map(_epsilon, one["ledger"]["totals"]), default=0.0))
    agrees = all({**one["ledger"], "replaced": []} == {**one["planned"], "replaced": []} for one in ledgers)
    return {**worst["ledger"], "said": describe_ledger(worst["ledger"]), "agrees": agrees}


def _epsilon(total: Mapping[str, Any]) -> float:
    return math.inf if total["epsilon"] is None else float(total["epsilon"])


def epsilon_per_round(runs: Sequence[RunResult]) -> dict[str, tuple[list[int], list[float]]]:
    """Return what is protected -> rounds and epsilon after each, the largest over seeds."""
    over_seeds = group_pairs(
        ((protects, entry["round"] + 1), epsilon)
        for run in runs
        for entry in run.history
        for protects, epsilon in (entry.get("epsilons") or {}).items()
        if epsilon is not None
    )
    epsilons = nest((protects, number, max(found)) for (protects, number), found in over_seeds.items())
    return {name: (sorted(rounds), [rounds[r] for r in sorted(rounds)]) for name, rounds in epsilons.items()}
