"""The trials of a search, one by one: put together, trained, attacked, measured, and written down.

What a trial found is in its record, `trials/NNNNN.json`, and its runs lie in `runs/` like those of a grid: whether it
is over is decided there, and Optuna is told. So a crash between any two steps costs what the step had not written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitfed.core import digests
from splitfed.core.errors import InvalidInput, SplitfedError
from splitfed.data.dataset import Dataset
from splitfed.study.config.cell import Cell
from splitfed.study.config.schema import PruneTable
from splitfed.study.config.search import SearchStudy
from splitfed.study.config.search_space import describe
from splitfed.study.report.data import Json, scored_utility
from splitfed.study.run import trials
from splitfed.study.run.ownership import Locks, LostRun, new_call
from splitfed.study.run.progress import Watcher
from splitfed.study.run.results_csv import promised_epsilon
from splitfed.study.run.runner import identity_of, run_cell, write_result
from splitfed.study.run.search_check import check_setting
from splitfed.study.run.search_queue import SearchQueue, TrialInHand
from splitfed.study.run.search_values import MissingMetric, measure_metric
from splitfed.study.run.store import StudyFolder
from splitfed.training.checkpoint import write_atomic
from splitfed.training.folder import RunFolder

ADVICE = "delete it and go on with --resume: its runs are kept"


class HopelessRun(SplitfedError):
    """A run was ended early, for runs before it did better by the same round."""


def open_search(search: SearchStudy, folder: Path, call: str | None = None) -> SearchQueue:
    """Open the trials of `search` that are done in `folder`; raises `Damaged` where study.db is.

    `call`: a mark of the call that this process works for, by default one of its own.
    """
    owner = "" if search.table.storage is None else _folder_mark(folder)
    with trials.detect_damage(folder / "study.db"):
        return SearchQueue(search, folder, Locks(folder, call or new_call()), owner)


def do_trials(search: SearchStudy, data: Dataset, folder: Path, queue: SearchQueue, watcher: Watcher) -> None:
    """Do trials until all are done, or are being done by others."""
    try:
        while (hand := queue.take()) is not None:
            try:
                do_trial(search, data, folder, queue, hand, watcher)
            except LostRun as error:
                queue.release(hand.number)
                watcher.note(f"trial {hand.number} is left to another process: {error}")
    finally:
        queue.release()


def do_trial(
    search: SearchStudy, data: Dataset, folder: Path, queue: SearchQueue, hand: TrialInHand, watcher: Watcher
) -> Json:
    """Do the trial `hand`, or what is left of it; return its record, as written."""
    record = read_record(folder, hand.number)
    if record is None:
        record = _carry_out(search, data, folder, queue, hand, watcher)
        queue.check(hand.number)
        write_record(folder, record)
    queue.tell(hand, record)
    failed = {"failed": True} if record["state"] == "failed" else {}
    watcher.finish(f"trial {hand.number}", format_record(record), **failed)
    return record


def read_record(folder: Path, number: int) -> Json | None:
    """Return the record of a trial in the study's `folder`, None where it is not over."""
    path = _record_path(folder, number)
    return digests.read(path, ADVICE) if path.is_file() else None


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a trial into the study's `folder`."""
    write_atomic(_record_path(folder, int(record["trial"])), digests.json_with_digest(record))


def collect_records(folder: Path, queue: SearchQueue) -> list[Json]:
    """Return the records of all trials that are over by number, those of other folders written down here as well."""
    for number, record in queue.records().items():
        if read_record(folder, number) is None:
            write_record(folder, record)
    found = (read_record(folder, number) for number in sorted(queue.records()))
    return [record for record in found if record is not None]


def format_record(record: Mapping[str, Any]) -> str:
    """Return how a trial ended, in a line."""
    name = f"trial {record['trial']}"
    if record["state"] != "complete":
        return f"{name}: {record['state']}: {record['reason']}"
    parts = [f"{metric} {format_mean(found)}" for metric, found in record["metrics"].items()]
    broken = [text for text, over in record["violations"].items() if over > 0]
    limits = f"; violates {', '.join(broken)}" if broken else ""
    return f"{name}: {', '.join(parts)}{limits}; {', '.join(f'{k}={v}' for k, v in record['parameters'].items())}"


def format_mean(found: Mapping[str, Any]) -> str:
    """Return the mean of a metric for people; "none" where there is no bound."""
    return "none" if found["mean"] is None else f"{found['mean']:.4g}"


def _carry_out(
    search: SearchStudy, data: Dataset, folder: Path, queue: SearchQueue, hand: TrialInHand, watcher: Watcher
) -> Json:
    record = blank_record(search, hand)
    try:
        cells = check_setting(search, hand.assignment, data).cells
    except digests.Damaged:
        raise
    except InvalidInput as error:
        reason = str(error).splitlines()[0].removeprefix(f"{search.source}: ")
        return record | {"state": "refused", "reason": reason}
    record |= {"runs": [cell.id for cell in cells], "setting": _setting_of(cells[0])}
    results: list[Json] = []
    for cell in cells:
        watcher.start(f"trial {hand.number}, {cell.id}")
        try:
            others = [] if results else list(queue.records().values())
            result = _run_once(search, cell, data, folder, watcher, others, queue, hand.number)
        except HopelessRun as error:
            history = RunFolder(StudyFolder(folder).run(cell.id)).metrics()
            curve = best_so_far(history, data.task.higher_is_better)
            return record | {"state": "pruned", "reason": f"{cell.id}: {error}", "curve": curve}
        if "failed" in result:
            pruned = str(result["failed"]).startswith("pruned")
            return record | {"state": "pruned" if pruned else "failed", "reason": f"{cell.id}: {result['failed']}"}
        results.append(result)
    return record | _judge(search, results) | {"curve": best_so_far(results[0]["history"], data.task.higher_is_better)}


def _run_once(
    search: SearchStudy,
    cell: Cell,
    data: Dataset,
    folder: Path,
    watcher: Watcher,
    others: Sequence[Mapping[str, Any]],
    queue: SearchQueue,
    number: int,
) -> Json:
    """Do one run, which no other process of this folder does at the same time: trials may ask for the same one."""
    home, rule = StudyFolder(folder).run(cell.id), search.table.prune
    claim = queue.locks.claim(cell.id, wait=True)
    assert claim is not None

    def guard() -> None:
        claim.check()
        queue.check(number)

    with claim:
        judge = watcher if rule is None else _Judge(watcher, rule, home, data.task.higher_is_better, others)
        try:
            return run_cell(cell, data, home, judge, guard)
        except HopelessRun as error:
            guard()
            write_result(home, {**identity_of(cell), "failed": str(error)})
            raise


def _judge(search: SearchStudy, results: Sequence[Json]) -> Json:
    """Return what the finished `results` of a trial are worth."""
    try:
        metrics = {name: measure_metric(results, metric) for name, metric in search.metrics.items()}
    except MissingMetric as error:
        return {"state": "failed", "reason": str(error)}
    return {
        **judge_metrics(search, metrics),
        "promised": any(found.get("privacy") for found in results),
        "spent": _sum_epsilons(results),
    }


def judge_metrics(search: SearchStudy, metrics: Mapping[str, Json]) -> Json:
    """Return what of a record follows from the `metrics` of a trial: objectives, violations, whether it is feasible."""
    means = {name: math.inf if found["mean"] is None else float(found["mean"]) for name, found in metrics.items()}
    violations = {one.text: one.violation(means[one.metric.name]) for one in search.constraints}
    return {
        "state": "complete",
        "metrics": dict(metrics),
        "objectives": {one.metric.name: one.value_of(means[one.metric.name]) for one in search.objectives},
        "violations": violations,
        "feasible": all(over <= 0 for over in violations.values()),
    }


def _sum_epsilons(results: Sequence[Json]) -> float | None:
    """Return what all runs of a trial promise, added up (basic composition); None where one promises no bound."""
    spent = [promised_epsilon(one["privacy"]["ledger"]) if one.get("privacy") else None for one in results]
    known = [epsilon for epsilon in spent if epsilon is not None]
    return math.fsum(known) if len(known) == len(spent) else None


def blank_record(search: SearchStudy, hand: TrialInHand) -> Json:
    """Return the record of a trial of which nothing is known but what it tries."""
    return {
        "trial": hand.number,
        "state": "failed",
        "reason": None,
        "parameters": describe(search.tree, hand.assignment),
        "setting": None,
        "runs": [],
        "metrics": {},
        "objectives": {},
        "violations": {},
        "feasible": False,
        "promised": False,
        "spent": None,
        "curve": [],
    }


def _setting_of(cell: Cell) -> Json:
    """Return what a trial's runs have in common, by their labels."""
    return {
        "topology": cell.topology.builder.label,
        "schedule": cell.training.schedule.label,
        "method": cell.method.label,
        "defense": cell.defense.label,
        "family": cell.defense.name,
        "variant": cell.variant,
    }


def best_so_far(history: Sequence[Mapping[str, Any]], rises: bool) -> list[tuple[int, float]]:
    """Return (round from 1, best utility up to it), for the rounds that were scored."""
    found: list[tuple[int, float]] = []
    for entry in history:
        if (value := scored_utility(entry)) is not None:
            best = value if not found else (max if rises else min)(found[-1][1], value)
            found.append((int(entry["round"]) + 1, best))
    return found


def find_hopeless(
    rule: PruneTable, curve: Sequence[tuple[int, float]], others: Sequence[Sequence[Sequence[float]]], rises: bool
) -> str | None:
    """Return why the run with this `curve` (see `best_so_far`) is hopeless beside the curves of `others`, or None."""
    if not curve or curve[-1][0] < rule.warmup:
        return None
    number, best = curve[-1]
    there = sorted(value for other in others for at, value in other if at == number)
    if len(there) < rule.startup:
        return None
    sign = 1.0 if rises else -1.0
    worse = sum(sign * value < sign * best for value in there) / len(there)
    equal = sum(value == best for value in there) / len(there)
    if 100 * (worse + equal) > rule.percentile:
        return None
    return (
        f"pruned after round {number}: utility {best:.4g} is in the lowest {rule.percentile:g} % of {len(there)} trials"
    )


class _Judge:
    """Watches a run for `watcher` and ends it by `HopelessRun` where the rule says so; its folder has the rounds."""

    def __init__(
        self, watcher: Watcher, rule: PruneTable, home: Path, rises: bool, others: Sequence[Mapping[str, Any]]
    ) -> None:
        self._watcher, self._rule, self._home, self._rises = watcher, rule, home, rises
        self._others = [one["curve"] for one in others if one["curve"]]

    def start(self, run: str) -> None:
        """Pass it on."""
        self._watcher.start(run)

    def attack(self, name: str, done: int, total: int) -> None:
        """Pass it on."""
        self._watcher.attack(name, done, total)

    def finish(self, run: str, line: str, failed: bool = False) -> None:
        """Pass it on."""
        self._watcher.finish(run, line, **({"failed": True} if failed else {}))

    def note(self, line: str) -> None:
        """Pass it on."""
        self._watcher.note(line)

    def note_once(self, key: str, make: Callable[[], str]) -> None:
        """Pass it on."""
        self._watcher.note_once(key, make)

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Pass it on, and look whether the run is worth going on with."""
        self._watcher.round(done, total, **({} if epsilon is None else {"epsilon": epsilon}))
        if done == total:
            return
        curve = best_so_far(RunFolder(self._home).metrics(), self._rises)
        if (reason := find_hopeless(self._rule, curve, self._others, self._rises)) is not None:
            raise HopelessRun(reason)


def _record_path(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:05d}.json"


def _folder_mark(folder: Path) -> str:
    """Return the mark by which a storage that several folders share knows this one, made at first use."""
    path = folder / ".folder"
    if not path.is_file():
        write_atomic(path, os.urandom(16).hex().encode())
    return path.read_text("utf-8")
