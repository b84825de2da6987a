"""A study from file to results: check everything, then do the runs that are left, alone or with workers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from splitfed.data.dataset import Dataset
from splitfed.errors import SplitfedError
from splitfed.study import config, trials
from splitfed.study.cell import Cell
from splitfed.study.grid import Grid, expand
from splitfed.study.progress import Reports, Watcher, relay, watcher
from splitfed.study.rehearsal import rehearse
from splitfed.study.remarks import remarks
from splitfed.study.report_data import METRICS
from splitfed.study.runner import Json, perform, result
from splitfed.study.store import StudyFolder


class WorkerDied(SplitfedError):
    """A worker process ended before its work did."""


@dataclass(frozen=True)
class Ready:
    """A study that has been checked: its runs and its data; `text` as the user wrote it."""

    grid: Grid
    data: Dataset
    text: str


def prepare(path: Path) -> Ready:
    """Read and check the study in the file `path`: everything but the training; nothing is written."""
    raw = config.read(path)
    grid, data = check(raw, path.name, path.resolve().parent)
    return Ready(grid, data, path.read_text("utf-8"))


def check(raw: Mapping[str, Any], source: str, base: Path) -> tuple[Grid, Dataset]:
    """Check the study `raw`, called `source` in messages; relative paths start from `base`."""
    grid = expand(config.parse(raw, source), source, base)
    return grid, rehearse(grid, source)


def run_study(ready: Ready, folder: Path, *, resume: bool = False, workers: int = 1) -> list[Json]:
    """Do all runs of the study that have no result yet in `folder`; return the results of all."""
    home = StudyFolder(folder)
    home.check(ready.grid, resume=resume)
    cells = {cell.id: cell for cell in ready.grid.cells}
    with home.lock() as lock:
        home.claim(ready.grid, ready.text)
        left = [name for name in cells if result(home.run(name)) is None]
        queue = trials.open_queue(folder / "study.db", best=_best(ready))
        trials.fill(queue, left)
        with watcher(len(cells), len(cells) - len(left)) as told:
            if workers > 1 and len(left) > 1:
                _hire(folder, min(workers, len(left)), lock, told)
            elif left:
                _work(home, cells, ready.data, queue, told)
        results = home.results(cells)
        home.write_table(results)
        return results


def serve(folder: Path) -> None:
    """Work as one of several processes on the study in `folder`; what happens is told on standard output."""
    ready = prepare(folder / "config.toml")
    cells = {cell.id: cell for cell in ready.grid.cells}
    _work(StudyFolder(folder), cells, ready.data, trials.open_queue(folder / "study.db", best=_best(ready)), Reports())


def _best(ready: Ready) -> Literal["minimize", "maximize"]:
    return "maximize" if ready.data.task.higher_is_better else "minimize"


def _work(home: StudyFolder, cells: Mapping[str, Cell], data: Dataset, queue: Any, told: Watcher) -> None:
    def do(name: str) -> float | None:
        told.start(name)
        found = perform(cells[name], data, home.run(name), told)
        told.finish(name, closing(found))
        return None if "failed" in found else found["utility"]["test"]

    trials.work(queue, list(cells), do, home.path / ".turn")


def closing(found: Json) -> str:
    """Return how a run ended, in a line."""
    if "failed" in found:
        return f"{found['id']}: failed: {found['failed']}"
    utility = found["utility"]
    parts = [f"{utility['metric']} {utility['test']:.3f}", f"trained in {found['seconds']:.1f} s"]
    for attack in found["attacks"]:
        metric = next(m for m in METRICS if m in attack["scores"])
        score = attack["scores"][metric]["guess"]["mean"]
        said = "-" if score is None else f"{score:.3g}"
        parts.append(f"{attack['attack']} {metric} {said} in {attack['seconds']:.1f} s")
    return "; ".join([f"{found['id']}: {', '.join(parts)}", *remarks(found)])


def _hire(folder: Path, count: int, lock: int | None, told: Watcher) -> None:
    """Start `count` processes on the queue and pass on what they tell, until all have ended."""
    command = [sys.executable, "-m", "splitfed.cli", "_worker", str(folder)]
    inherited = () if lock is None else (lock,)
    together = threading.Lock()
    with ExitStack() as staffed:
        staff = [
            staffed.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=inherited)
            )
            for _ in range(count)
        ]
        listeners = [_Listener(worker, told, together) for worker in staff]
        try:
            for listener in listeners:
                listener.start()
            for listener in listeners:
                listener.join()
        except BaseException:
            for worker in staff:
                worker.terminate()
            raise
    for worker, listener in zip(staff, listeners, strict=True):
        if worker.returncode:
            last = [*listener.complaint.splitlines(), f"exit code {worker.returncode}"][-2:][0]
            raise WorkerDied(f"a worker ended early ({last}); go on with --resume")


class _Listener(threading.Thread):
    """Passes on what one worker tells; `complaint` is what it wrote on standard error."""

    def __init__(self, worker: subprocess.Popen[str], told: Watcher, together: threading.Lock) -> None:
        super().__init__(daemon=True)
        self._worker = worker
        self._told = told
        self._together = together
        self.complaint = ""

    def run(self) -> None:
        """Read until the worker closes its ends."""
        assert self._worker.stdout is not None
        assert self._worker.stderr is not None
        errors = threading.Thread(target=self._hear, args=(self._worker.stderr,), daemon=True)
        errors.start()
        for line in self._worker.stdout:
            with self._together:
                relay(line, self._told)
        errors.join()

    def _hear(self, stream: IO[str]) -> None:
        # Read all the time: a worker whose pipe is full would wait for ever.
        self.complaint = stream.read().strip()
