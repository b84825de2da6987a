"""A checked study to its results: do the runs that are left, alone or with workers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from splitfed.core import digests
from splitfed.core.errors import InvalidInput, SplitfedError
from splitfed.data.dataset import Dataset
from splitfed.models.import_paths import Code
from splitfed.study.config import build, schema
from splitfed.study.config.cell import Cell
from splitfed.study.config.search import SearchStudy, read_search
from splitfed.study.report.data import METRICS
from splitfed.study.report.remarks import remarks
from splitfed.study.report.search_data import read_search_outcome
from splitfed.study.run import failures, trials
from splitfed.study.run.checked_study import CheckedStudy as CheckedStudy
from splitfed.study.run.checked_study import check_study as check_study
from splitfed.study.run.checked_study import prepare_study as prepare_study
from splitfed.study.run.checked_study import read_study_file as read_study_file
from splitfed.study.run.encryption_keys import check_keys
from splitfed.study.run.progress import Reports, Watcher, open_watcher, relay_event
from splitfed.study.run.runner import Json, read_result, run_cell
from splitfed.study.run.search import collect_records, do_trials, open_search
from splitfed.study.run.store import StudyFolder, write_trials_table
from splitfed.study.run.trust import check_links, write_mark

PATIENCE = 2.0
"""Seconds that workers get to end by themselves."""


class WorkerDied(SplitfedError):
    """A worker process ended before its work did."""


def run_study(
    ready: CheckedStudy, folder: Path, *, resume: bool = False, workers: int = 1, trust: bool = False
) -> list[Json]:
    """Do all runs of the study that have no result yet in `folder`; return the results of all.

    A folder that holds links out of itself, which would be written through, is resumed with `trust` alone.
    """
    home = StudyFolder(folder)
    home.check(ready.grid, resume=resume)
    if not trust:
        check_links(folder)
    cells = {cell.id: cell for cell in ready.grid.cells}
    check_keys(cells.values(), folder)
    with home.lock() as lock:
        home.claim(ready.grid, ready.text)
        if not trust:  # what is trusted for one call is not the user's own for ever
            write_mark(folder, ready.code.sources(), tomllib.loads(ready.text))
        if ready.search is not None:
            return _search(ready, ready.search, home, lock, workers)
        unfinished = [name for name in cells if read_result(home.run(name)) is None]
        with trials.detect_damage(folder / "study.db"):
            queue = trials.open_queue(folder / "study.db", best=_utility_direction(ready.data))
            trials.fill_queue(queue, unfinished, cells)
        with open_watcher(len(cells), len(cells) - len(unfinished)) as watcher:
            if workers > 1 and len(unfinished) > 1:
                # What `ignore_signals` does is undone, also for a caller that goes on.
                with failures.catch_termination():
                    _run_workers(folder, ready.code, min(workers, len(unfinished)), lock, watcher)
            elif unfinished:
                _work_queue(home, cells, ready.data, queue, watcher)
        results = home.results(cells)
        home.write_table(results)
        return results


def _search(ready: CheckedStudy, search: SearchStudy, home: StudyFolder, lock: int | None, workers: int) -> list[Json]:
    """Do all trials of the search that are not over; return the results of all their runs."""
    if workers > 1 and sys.platform == "win32":  # who lives is seen by locks that Windows lacks
        raise InvalidInput(f"workers={workers} is not allowed; a search has one on Windows")
    queue = open_search(search, home.path)
    finished = len(queue.records())
    left = search.trials - finished
    with open_watcher(search.trials, finished) as watcher:
        if workers > 1 and left > 1:
            try:
                with failures.catch_termination():
                    _run_workers(home.path, ready.code, min(workers, left), lock, watcher)
            except WorkerDied as error:
                warnings.warn(f"{str(error).partition(';')[0]}; its trial is taken again", stacklevel=2)
        # What a worker that died has left, too.
        do_trials(search, ready.data, home.path, queue, watcher)
    records = collect_records(home.path, queue)
    results = home.results(dict.fromkeys(run for record in records for run in record["runs"]))
    home.write_table(results)
    outcome = read_search_outcome(home.path)
    write_trials_table(home.path, records, () if outcome is None else outcome.front)
    return results


def run_worker(folder: Path, code: Code) -> None:
    """Work as one of several processes on the study in `folder`; what happens is reported on standard output.

    `code`: where import paths may lead, as the process says that has checked all this.
    """
    raw = schema.read_toml(folder / "config.toml", digests.STUDY_CONFIG)
    if "search" in raw:
        search, first = read_search(raw, "config.toml", folder, code)
        found = build.dataset(first.cells[0].data)
        do_trials(search, found, folder, open_search(search, folder), Reports())
        return
    grid, data = check_study(raw, "config.toml", folder, code)
    cells = {cell.id: cell for cell in grid.cells}
    with trials.detect_damage(folder / "study.db"):
        queue = trials.open_queue(folder / "study.db", best=_utility_direction(data))
    _work_queue(StudyFolder(folder), cells, data, queue, Reports())


def _utility_direction(data: Dataset) -> Literal["minimize", "maximize"]:
    return "maximize" if data.task.higher_is_better else "minimize"


def _work_queue(home: StudyFolder, cells: Mapping[str, Cell], data: Dataset, queue: Any, watcher: Watcher) -> None:
    def do(name: str) -> float | None:
        watcher.start(name)
        result = run_cell(cells[name], data, home.run(name), watcher)
        watcher.finish(name, format_outcome(result))
        return None if "failed" in result else result["utility"]["test"]

    trials.work_queue(queue, list(cells), do, home.path / ".turn")


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


def _run_workers(folder: Path, code: Code, count: int, lock: int | None, watcher: Watcher) -> None:
    """Start `count` processes on the queue and pass on what they report, until all have ended."""
    # A folder's name may begin with a dash.
    command = [sys.executable, "-m", "splitfed.cli", "_worker", str(folder.absolute()), code.to_json()]
    start = partial(
        subprocess.Popen,
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=() if lock is None else (lock,),
    )
    watcher_lock = threading.Lock()
    workers: list[subprocess.Popen[str]] = []
    with ExitStack() as process_stack:
        try:
            workers.extend(process_stack.enter_context(start()) for _ in range(count))
            listeners = [_WorkerListener(worker, watcher, watcher_lock) for worker in workers]
            for listener in listeners:
                listener.start()
            for listener in listeners:
                listener.join()
        except BaseException:
            failures.ignore_signals()
            _stop_workers(workers)
            raise
    for worker, listener in zip(workers, listeners, strict=True):
        if worker.returncode:
            last = [*listener.complaint.splitlines(), f"exit code {worker.returncode}"][-2:][0]
            if worker.returncode == 2:
                raise InvalidInput(last)
            raise WorkerDied(f"a worker ended early ({last}); go on with --resume")


def _stop_workers(workers: Sequence[subprocess.Popen[str]]) -> None:
    """End the workers: ask them, and do not wait for long."""
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


class _WorkerListener(threading.Thread):
    """Passes on what one worker reports; `complaint` is what it wrote on standard error."""

    def __init__(self, worker: subprocess.Popen[str], watcher: Watcher, lock: threading.Lock) -> None:
        super().__init__(daemon=True)
        self._worker, self._told, self._together = worker, watcher, lock
        self.complaint = ""

    def run(self) -> None:
        """Read until the worker closes its ends."""
        assert self._worker.stdout is not None
        assert self._worker.stderr is not None
        errors = threading.Thread(target=self._hear, args=(self._worker.stderr,), daemon=True)
        errors.start()
        for line in self._worker.stdout:
            with self._together:
                relay_event(line, self._told)
        errors.join()

    def _hear(self, stream: IO[str]) -> None:
        # Read all the time: a worker whose pipe is full would wait for ever.
        self.complaint = stream.read().strip()
