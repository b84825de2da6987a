"""What `splitfed run --dry-run` prints: the runs of a study, which of them are done, and about how long the rest takes.

A run takes as long as finished runs of its setting in the folder did, their attacks included; one of a setting without
such runs as long as a few of its steps say, by the clock, which leaves attacks out. How long those take that may double
their work is told beside, from a little of that work in a run that is left, not trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from rich.console import Console

from splitfed.attacks.work import StatesWork
from splitfed.core.digests import Damaged
from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Dataset
from splitfed.study.config import build
from splitfed.study.config.run_spec import RunSpec
from splitfed.study.report.units import count_noun, format_seconds
from splitfed.study.results import RunResult, read_result
from splitfed.study.run.checked_study import CheckedStudy
from splitfed.study.run.preflight import build_untrained_run
from splitfed.study.run.runner import Json
from splitfed.study.run.search import read_record
from splitfed.study.run.search_plan import measure_training
from splitfed.study.run.store import StudyFolder
from splitfed.training.folder import RunFolder

PATIENCE = 20.0
"""Seconds after which no more settings are timed: others take the mean of those that were."""


def list_runs(ready: CheckedStudy, folder: Path, workers: int) -> Json:
    """Return the runs of the study in `folder`, or of a search its trials, as plain values; nothing is written.

    `seconds`: that what is left takes with `workers` processes; None where it cannot be timed. `timed`: of how many
    settings that are left a few steps were trained for this.
    """
    home, cells = StudyFolder(folder), ready.grid.cells
    if ready.search is not None:
        records = [read_record(folder, number) for number in range(ready.search.trials)]
        states = [
            {"run": f"trial {n}", "state": "to do" if found is None else f"done ({found['state']})"}
            for n, found in enumerate(records)
        ]
        left = [cell for found in records if found is None for cell in cells]
        done: list[tuple[RunSpec, RunResult]] = []
    else:
        results = {cell.id: read_result(home.run(cell.id), cell.id) for cell in cells}
        states = [{"run": cell.id, "state": _state_of(home.run(cell.id), results[cell.id], cell)} for cell in cells]
        left = [cell for cell in cells if results[cell.id] is None]
        done = [(cell, found) for cell in cells if (found := results[cell.id]) is not None]
    estimate = DurationEstimate(ready.data, done)
    seconds = [estimate.seconds_of(cell) for cell in left]
    known = [one for one in seconds if one is not None]
    rest = (len(seconds) - len(known)) * fmean(known) if known else 0.0
    shared = min(workers, max(1, len(left)))
    return {
        "study": ready.grid.name,
        "folder": str(folder),
        "runs": states,
        "refused": [{"run": run, "reason": reason} for run, reason in ready.grid.refused],
        "left": sum(one["state"].startswith(("to do", "begun")) for one in states),
        "seconds": (sum(known) + rest) / shared if known or not left else None,
        "workers": workers,
        "timed": estimate.timed,
        "attack_durations": _plan_attacks(left[0], ready.data) if left and not estimate.finished else [],
        "attacks_timed": all(not cell.attacks or setting_of(cell) in estimate.finished for cell in left),
    }


def print_runs(listed: Json, console: Console) -> None:
    """Print what `list_runs` returned."""
    lines = [f"{one['run']}: {one['state']}" for one in listed["runs"]]
    lines += [f"{one['run']}: refused, left out: {one['reason']}" for one in listed["refused"]]
    whole, left = len(listed["runs"]), listed["left"]
    lines += [f"{one}, in each run" for one in listed["attack_durations"]]
    total = f"{left} of {count_noun(whole, 'run')} left in {listed['folder']}"
    if left and listed["seconds"] is not None:
        by = f" with {listed['workers']} workers" if listed["workers"] > 1 else ""
        total += f", about {format_seconds(listed['seconds'])}{by}"
        total += "" if listed["attacks_timed"] else "; attacks come on top"
    for line in [*lines, total, "nothing was written"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _plan_attacks(cell: RunSpec, data: Dataset) -> list[str]:
    """Return about how long each attack of `cell` takes that says what its work is, in words."""
    attack_settings = [(setting, build.attack(setting)) for setting in cell.attacks]
    if not any(isinstance(attack, StatesWork) for _, attack in attack_settings):
        return []
    run, found = build_untrained_run(cell, data), []
    for setting, attack in attack_settings:
        if isinstance(attack, StatesWork):
            try:
                planned = run.plan_attack(attack, adversary=setting.adversary, releases=setting.releases)
            except InvalidInput:
                # In a run that is secured it is refused after its training, which is a result.
                continue
            found.append(str(planned))
    return found


def setting_of(cell: RunSpec) -> tuple[str, ...]:
    """Return what runs that differ in their seed alone have in common."""
    inside = "" if cell.training_attack is None else cell.training_attack.key
    return (*cell.labels.values(), cell.defense.label, cell.variant, inside)


class DurationEstimate:
    """How long runs take on `data`, by the results of those that are `done` and by the clock.

    `finished`: setting -> mean seconds of its finished runs; `timed`: how many settings had a few steps trained.
    """

    def __init__(
        self, data: Dataset, done: list[tuple[RunSpec, RunResult]], clock: Callable[[], float] = time.monotonic
    ):
        self._data, self._clock, self._began = data, clock, clock()
        self._measured: dict[tuple[str, ...], float | None] = {}
        self.timed = 0
        found: dict[tuple[str, ...], list[float]] = {}
        for cell, result in done:
            if result.failed is None:
                whole = result.seconds + sum(attack.seconds for attack in result.attacks)
                found.setdefault(setting_of(cell), []).append(whole)
        self.finished = {setting: fmean(seconds) for setting, seconds in found.items()}

    def seconds_of(self, cell: RunSpec) -> float | None:
        """Return about how many seconds the run `cell` takes; None where that was not measured."""
        setting = setting_of(cell)
        if setting in self.finished:
            return self.finished[setting]
        if setting not in self._measured:
            if self._measured and self._clock() - self._began > PATIENCE:
                return None
            self._measured[setting] = measure_training(cell, self._data)
            self.timed += 1
        return self._measured[setting]


def _state_of(folder: Path, result: RunResult | None, cell: RunSpec) -> str:
    """Return how far the run in `folder` is."""
    if result is not None:
        return "done" if result.failed is None else f"done (failed: {result.failed})"
    try:
        rounds = len(RunFolder(folder).metrics())
    except Damaged as error:
        return f"begun; {error}"
    return f"begun, {rounds} of {count_noun(cell.training.rounds, 'round')} trained" if rounds else "to do"
