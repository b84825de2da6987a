"""The trials of a search, one by one: put together, trained, attacked, measured, and written down.

What a trial found is in its record, `trials/NNNNN.json`, and its runs lie in `runs/` like those of a grid: whether it
is over is decided there, and Optuna is told. So a crash between any two steps costs what the step had not written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from splitfed.core import digests
from splitfed.core.errors import InvalidInput, SplitfedError
from splitfed.data.dataset import Dataset
from splitfed.study.config.run_spec import RunSpec
from splitfed.study.config.schema import PruneTable
from splitfed.study.config.search import SearchStudy
from splitfed.study.config.search_metrics import SearchMetric
from splitfed.study.config.search_space import describe
from splitfed.study.report.data import Json, bounds_of, estimate, scored_utility
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.search_data import ADVICE, read_search_outcome, read_trials
from splitfed.study.results import RunResult, write_result
from splitfed.study.run.progress import Watcher
from splitfed.study.run.results_csv import promised_epsilon, table_rows, write_trials_table
from splitfed.study.run.runner import identity_of, run_cell
from splitfed.study.run.search_check import check_setting
from splitfed.study.run.search_queue import DrawnTrial, SearchQueue
from splitfed.study.run.store import StudyFolder, hold_run
from splitfed.study.run.workers import Job
from splitfed.training.checkpoint import write_atomic
from splitfed.training.folder import RunFolder


class HopelessRun(SplitfedError):
    """A run was ended early, for runs before it did better by the same round."""


class MissingMetric(SplitfedError):
    """A finished run has no number where the search needs one."""


class SearchWork:
    """The trials of `search` on `data` in the folder `home`, as jobs; whoever asks for `jobs` has its database."""

    def __init__(self, search: SearchStudy, data: Dataset, home: StudyFolder) -> None:
        self._search, self._data, self._home = search, data, home
        self.total = search.trials

    @cached_property
    def _queue(self) -> SearchQueue:
        return SearchQueue(self._search, self._home.path)

    @property
    def finished(self) -> int:
        """How many trials are over."""
        return len(self._queue.records())

    def jobs(self) -> Iterator[Job]:
        """Yield the trials that are to be done here, each drawn when it is asked for."""
        while (drawn := self._queue.take()) is not None:
            write_missing_records(self._home.path, self._queue)
            yield Job(f"trial {drawn.number}", drawn)

    def do(self, job: Job, watcher: Watcher) -> None:
        """Do a trial."""
        do_trial(self._search, self._data, self._home.path, DrawnTrial(*job.value), watcher)

    def done(self, job: Job) -> None:
        """Tell Optuna what came out of a trial."""
        number = DrawnTrial(*job.value).number
        record = read_record(self._home.path, number)
        assert record is not None
        self._queue.tell(number, record)

    def results(self) -> list[RunResult]:
        """Write the tables of all runs and trials, and return the results of the runs."""
        write_missing_records(self._home.path, self._queue)
        outcome = read_search_outcome(self._home.path)
        assert outcome is not None
        results = self._home.write_table(dict.fromkeys(run for record in outcome.records for run in record["runs"]))
        write_trials_table(self._home.path, outcome.records, outcome.front)
        return results


def do_trial(search: SearchStudy, data: Dataset, folder: Path, drawn: DrawnTrial, watcher: Watcher) -> Json:
    """Do the trial `drawn`, or what is left of it; return its record, as written."""
    record = read_record(folder, drawn.number)
    if record is None:
        record = blank_record(search, drawn) | _carry_out(search, data, folder, drawn, watcher)
        write_record(folder, record)
    watcher.finish(format_record(record), record["state"] == "failed")
    return record


def read_record(folder: Path, number: int) -> Json | None:
    """Return the record of a trial in the study's `folder`, None where it is not over."""
    path = _record_path(folder, number)
    return digests.read(path, ADVICE) if path.is_file() else None


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a trial into the study's `folder`."""
    write_atomic(_record_path(folder, int(record["trial"])), digests.json_with_digest(record))


def write_missing_records(folder: Path, queue: SearchQueue) -> None:
    """Write into the study's `folder` the records of trials that are over and were done in another one."""
    for number, record in queue.records().items():
        if not _record_path(folder, number).is_file():
            write_record(folder, record)


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


def _carry_out(search: SearchStudy, data: Dataset, folder: Path, drawn: DrawnTrial, watcher: Watcher) -> Json:
    """Return what of a trial's record is known when its runs are done."""
    try:
        cells = check_setting(search, drawn.assignment, data).cells
    except digests.Damaged:
        raise
    except InvalidInput as error:
        reason = str(error).splitlines()[0].removeprefix(f"{search.source}: ")
        return {"state": "refused", "reason": reason}
    known = {"runs": [cell.id for cell in cells], "setting": _setting_of(cells[0])}
    results: list[RunResult] = []
    rule, rises = search.table.prune, data.task.higher_is_better
    for cell in cells:
        watcher.start(f"trial {drawn.number}, {cell.id}")
        home, judge = StudyFolder(folder).run(cell.id), None
        if rule is not None and not results:  # trials are set side by side by their first seed
            judge = partial(_judge_round, rule, home, rises, [one["curve"] for one in read_trials(folder)])
        with hold_run(home):  # trials may ask for the same run
            try:
                result = run_cell(cell, data, home, watcher, judge)
            except HopelessRun as error:
                result = write_result(home, replace(identity_of(cell), failed=str(error)))
        if result.failed is not None:
            pruned = result.failed.startswith("pruned")
            curve = best_so_far(RunFolder(home).metrics(), rises) if pruned else []
            state = "pruned" if pruned else "failed"
            return known | {"state": state, "reason": f"{cell.id}: {result.failed}", "curve": curve}
        results.append(result)
    return known | _judge(search, results) | {"curve": best_so_far(results[0].history, rises)}


def _judge_round(rule: PruneTable, home: Path, rises: bool, others: Sequence[Any], done: int, total: int) -> None:
    """Raise `HopelessRun` where the rule says so of the run in `home`, beside the curves of `others`.

    `done` of `total` rounds are trained and written.
    """
    if done == total:
        return
    if (reason := find_hopeless(rule, best_so_far(RunFolder(home).metrics(), rises), others, rises)) is not None:
        raise HopelessRun(reason)


def _judge(search: SearchStudy, results: Sequence[RunResult]) -> Json:
    """Return what the finished `results` of a trial are worth."""
    try:
        metrics = {name: measure_metric(results, metric) for name, metric in search.metrics.items()}
    except MissingMetric as error:
        return {"state": "failed", "reason": str(error)}
    return {
        **judge_metrics(search, metrics),
        "promised": any(found.ledger is not None for found in results),
        "spent": _sum_epsilons(results),
    }


def measure_metric(results: Sequence[RunResult], metric: SearchMetric) -> Json:
    """Return mean, interval and count of `metric` over the `results` of a trial; no mean: there is no bound.

    Of epsilon it is the largest over the seeds, not the mean. Runs that an attack hijacked count for that attack alone.
    Raises `MissingMetric`.
    """
    if metric.attack is None:
        honest = [one for one in results if not one.training_attack] or results
        rows = [next(table_rows(one)) for one in honest]
        bounds = bounds_of(honest) if metric.column.startswith("utility") else (-math.inf, math.inf)
        over = "rows"
    else:
        rows = [row for one in results for row in table_rows(one) if row.get("attack") == metric.attack]
        bounds, over = METRICS[metric.column].bounds, "victims"
    if metric.without_bound:
        values = [row.get(metric.column) for row in rows]
        known = [float(value) for value in values if value is not None]
        largest = max(known) if len(known) == len(values) else None
        return {"mean": largest, "low": None, "high": None, "n": len(values), "over": "nothing"}
    numbers, own = [], []
    for row in rows:
        value = row.get(metric.column)
        if value is None or not math.isfinite(value):
            there = ", ".join(key for key, one in row.items() if isinstance(one, (int, float)))
            raise MissingMetric(f"run {row['run']} has no {metric.name}; it has {there}")
        own.append({side: row.get(f"{metric.column}_{side}") for side in ("low", "high")})
        numbers.append(float(value))
    if not numbers:
        raise MissingMetric(f"no run was attacked by {metric.attack}")
    centre = None if metric.attack is None else METRICS[metric.column].centre
    if centre is not None:
        numbers = [METRICS[metric.column].leak(value) for value in numbers]
    # The interval of one score turned over is not that of the score.
    found = estimate(numbers, own if centre is None else (), bounds, over)
    assert found is not None
    return {key: getattr(found, key) for key in ("mean", "low", "high", "n", "over")}


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


def _sum_epsilons(results: Sequence[RunResult]) -> float | None:
    """Return what all runs of a trial promise, added up (basic composition); None where one promises no bound."""
    spent = [None if one.ledger is None else promised_epsilon(one.ledger) for one in results]
    known = [epsilon for epsilon in spent if epsilon is not None]
    return math.fsum(known) if len(known) == len(spent) else None


def blank_record(search: SearchStudy, drawn: DrawnTrial) -> Json:
    """Return the record of a trial of which nothing is known but what it tries."""
    return {
        "trial": drawn.number,
        "state": "failed",
        "reason": None,
        "parameters": describe(search.tree, drawn.assignment),
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


def _setting_of(cell: RunSpec) -> Json:
    """Return what a trial's runs have in common, by their labels."""
    return {
        "topology": cell.topology.label,
        "schedule": cell.schedule.label,
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


def _record_path(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:05d}.json"
