"""A checked study to its results: do the runs that are left, alone or with workers."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Dataset
from splitfed.models.import_paths import Code
from splitfed.study.config import build, schema
from splitfed.study.config.cell import Cell
from splitfed.study.config.search import SearchStudy, read_search
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.remarks import remarks
from splitfed.study.report.search_data import read_search_outcome
from splitfed.study.run import failures
from splitfed.study.run.checked import Checked, key_of, write_checked
from splitfed.study.run.checked_study import (
    CheckedStudy as CheckedStudy,
    check_raw,
    check_study as check_study,
    prepare_study as prepare_study,
    read_study_file as read_study_file,
)
from splitfed.study.run.encryption_keys import check_keys
from splitfed.study.run.ownership import MOST_DEATHS, Locks, new_call
from splitfed.study.run.progress import Reports, Watcher, open_watcher
from splitfed.study.run.results_csv import write_trials_table
from splitfed.study.run.run_queue import HeldRun, RunQueue, work_queue
from splitfed.study.run.runner import Json, read_result, run_cell
from splitfed.study.run.search import collect_records, do_trials, open_search
from splitfed.study.run.store import StudyFolder
from splitfed.study.run.terminal_messages import others_print_aside
from splitfed.study.run.trials import check_search_database
from splitfed.study.run.trust import check_links, write_mark
from splitfed.study.run.workers import run_workers
from splitfed.training.description import data_digest


def run_study(
    ready: CheckedStudy, folder: Path, *, resume: bool = False, workers: int = 1, trust: bool = False
) -> list[Json]:
    """Do all runs of the study that have no result yet in `folder`; return the results of all.

    A folder that holds links out of itself, which would be written through, is resumed with `trust` alone. A run at
    which several workers have died is left out, and said to be.
    """
    home = StudyFolder(folder)
    check_folder(ready, folder, resume=resume, workers=workers, trust=trust)
    cells = {cell.id: cell for cell in ready.grid.cells}
    call, key = new_call(), ready.key or key_of(ready.grid.resolved)
    with home.lock() as lock:
        home.claim(ready.grid, ready.text, data_digest(ready.data))
        if not trust:  # what is trusted for one call is not the user's own for ever
            write_mark(folder, ready.code.sources(), tomllib.loads(ready.text))
        write_checked(folder, Checked(key, ready.grid.refused, ready.setting))
        command = worker_command(folder, ready.code, key, call)
        if ready.search is not None:
            return _search(ready, ready.search, home, lock, workers, command, call)
        unfinished = [name for name in cells if read_result(home.run(name), name) is None]
        queue = RunQueue(home, list(cells), Locks(folder, call))
        with open_watcher(len(cells), len(cells) - len(unfinished)) as watcher:
            if workers > 1 and unfinished:
                # What `ignore_signals` does is undone, also for a caller that goes on.
                with failures.catch_termination():
                    run_workers(command, min(workers, len(unfinished)), lock, watcher, queue.has_work)
                _note_left_out(watcher, queue.left_out())
            elif unfinished:
                _work_queue(home, cells, ready.data, queue, watcher)
        with queue.locks.turn():
            results = home.results(cells)
            home.write_table(results)
        return results


def check_folder(ready: CheckedStudy, folder: Path, *, resume: bool, workers: int, trust: bool) -> None:
    """Refuse, without writing anything, what stands against doing the study in `folder`."""
    if workers > 1 and sys.platform == "win32":  # who lives is seen by locks that Windows lacks
        raise InvalidInput(f"workers={workers} is not allowed on Windows; expected 1")
    StudyFolder(folder).check(ready.grid, data_digest(ready.data), resume=resume)
    if not trust:
        check_links(folder)
    if ready.search is not None:
        check_search_database(folder, trust)
    check_keys(ready.grid.cells, folder)


def worker_command(folder: Path, code: Code, key: str, call: str) -> list[str]:
    """Return the command of a worker on the study in `folder`.

    `key`: of what has been checked; `call`: a mark of this call, which its processes share.
    """
    # A folder's name may begin with a dash.
    return [sys.executable, "-m", "splitfed.cli", "_worker", str(folder.absolute()), code.to_json(), key, call]


def _note_left_out(watcher: Watcher, names: list[str]) -> None:
    for name in names:
        watcher.note(f"{name} is left out: {MOST_DEATHS} workers died at it; go on with --resume to try it again")


def _search(
    ready: CheckedStudy,
    search: SearchStudy,
    home: StudyFolder,
    lock: int | None,
    workers: int,
    command: list[str],
    call: str,
) -> list[Json]:
    """Do all trials of the search that are not over; return the results of all their runs."""
    queue = open_search(search, home.path, call)
    finished = len(queue.records())
    left = search.trials - finished
    with open_watcher(search.trials, finished) as watcher:
        if workers > 1 and left:
            with failures.catch_termination():
                run_workers(command, min(workers, left), lock, watcher, queue.has_work)
            _note_left_out(watcher, queue.left_out())
        elif left:
            do_trials(search, ready.data, home.path, queue, watcher)
    records = collect_records(home.path, queue)
    with queue.locks.turn():
        results = home.results(dict.fromkeys(run for record in records for run in record["runs"]))
        home.write_table(results)
    outcome = read_search_outcome(home.path)
    write_trials_table(home.path, records, () if outcome is None else outcome.front)
    return results


def run_worker(folder: Path, code: Code, token: str, call: str) -> None:
    """Work as one of several processes on the study in `folder`; what happens is reported on standard output.

    `code`: where import paths may lead, as the process says that has checked all this. `token`: the key of its check,
    on which this process relies if it finds the same study and versions. `call`: the mark of its call.
    """
    reports = Reports(sys.stdout)
    with others_print_aside():
        _work(folder, code, token, call, reports)


def _work(folder: Path, code: Code, token: str, call: str, reports: Reports) -> None:
    raw = schema.read_toml(folder / "config.toml", digests.STUDY_CONFIG)
    home = StudyFolder(folder)
    if "search" in raw:
        search, first = read_search(raw, "config.toml", folder, code, checked=True)
        data = build.dataset(first.cells[0].data)
        home.check_data(data_digest(data))
        do_trials(search, data, folder, open_search(search, folder, call), reports)
        return
    ready = check_raw(raw, "config.toml", folder, code, "", folder, token)
    home.check_data(data_digest(ready.data))
    cells = {cell.id: cell for cell in ready.grid.cells}
    _work_queue(home, cells, ready.data, RunQueue(home, list(cells), Locks(folder, call)), reports)


def _work_queue(home: StudyFolder, cells: Mapping[str, Cell], data: Dataset, queue: RunQueue, watcher: Watcher) -> None:
    def do(held: HeldRun) -> None:
        watcher.start(held.name)
        result = run_cell(cells[held.name], data, home.run(held.name), watcher, held.claim.check)
        failed = "failed" in result
        watcher.finish(held.name, format_outcome(result), **({"failed": True} if failed else {}))

    work_queue(queue, do, lambda name, why: watcher.note(f"{name} is left to another process: {why}"))


def format_outcome(result: Json) -> str:
    """Return how a run ended, in a line."""
    if "failed" in result:
        return f"{result['id']}: failed: {result['failed']}"
    utility = result["utility"]
    parts = [f"{utility['metric']} {utility['test']:.3f}", f"trained in {result['seconds']:.1f} s"]
    for attack in result["attacks"]:
        metric = next(m for m in METRICS if m in attack["scores"])
        score = attack["scores"][metric]["attack"]["mean"]
        score_text = "-" if score is None else f"{score:.3g}"
        parts.append(f"{attack['attack']} {metric} {score_text} in {attack['seconds']:.1f} s")
    return "; ".join([f"{result['id']}: {', '.join(parts)}", *remarks(result)])
