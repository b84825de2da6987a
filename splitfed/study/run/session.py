"""A checked study to its results: do the runs that are left, alone or with workers."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Dataset
from splitfed.models.import_paths import NameResolver
from splitfed.study.config import schema
from splitfed.study.config.grid import Grid
from splitfed.study.config.run_spec import RunSpec
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.remarks import remarks
from splitfed.study.results import RunResult, read_result
from splitfed.study.run import failures
from splitfed.study.run.checked_study import CheckedStudy, check_raw
from splitfed.study.run.progress import Watcher, open_watcher
from splitfed.study.run.runner import run_cell
from splitfed.study.run.search import SearchWork
from splitfed.study.run.store import StudyFolder, hold_run
from splitfed.study.run.terminal_messages import others_print_aside
from splitfed.study.run.trials import check_search_database
from splitfed.study.run.workers import Job, Parent, Workers
from splitfed.study.trust import Checked, check_links, key_of, write_checked, write_mark
from splitfed.training.identity import data_digest


def run_study(
    ready: CheckedStudy, folder: Path, *, resume: bool = False, workers: int = 1, trust: bool = False
) -> list[RunResult]:
    """Do all runs of the study that have no result yet in `folder`; return the results of all.

    A folder that holds links out of itself, which would be written through, is resumed with `trust` alone. A run at
    which several workers have died is left out, and said to be. Raises `InvalidInput` where another call is at work.
    """
    check_folder(ready, folder, resume=resume, workers=workers, trust=trust)
    with claim_folder(ready, folder, trust=trust) as lock:
        work = _open_work(ready, folder)
        left = work.total - work.finished
        with open_watcher(work.total, work.finished) as watcher:
            if workers > 1 and left:
                pool = Workers(worker_command(folder, ready), lock, watcher, work.jobs(), work.done)
                # What `ignore_signals` does is undone, also for a caller that goes on.
                with failures.catch_termination():
                    pool.run(min(workers, left))
            else:
                for job in work.jobs():
                    work.do(job, watcher.worker(0))
                    work.done(job)
        return work.results()


@contextmanager
def claim_folder(ready: CheckedStudy, folder: Path, *, trust: bool) -> Iterator[int | None]:
    """Write what the study is into `folder` and keep other calls off it inside the block; yields as `home.lock`."""
    home = StudyFolder(folder)
    with home.lock() as lock:
        home.claim(ready.grid, ready.text, data_digest(ready.data))
        if not trust:  # what is trusted for one call is not the user's own for ever
            write_mark(folder, ready.code.sources(), tomllib.loads(ready.text))
        write_checked(folder, Checked(_key_of(ready), ready.grid.refused, ready.setting))
        yield lock


def _key_of(ready: CheckedStudy) -> str:
    return ready.key or key_of(ready.grid.resolved)


def _open_work(ready: CheckedStudy, folder: Path) -> GridWork | SearchWork:
    home = StudyFolder(folder)
    if ready.search is not None:
        return SearchWork(ready.search, ready.data, home)
    return GridWork(ready.grid, ready.data, home)


class GridWork:
    """The runs of `grid` on `data` in the folder `home`, as jobs: what has no result there is left to do."""

    def __init__(self, grid: Grid, data: Dataset, home: StudyFolder) -> None:
        self._cells, self._data, self._home = {cell.id: cell for cell in grid.cells}, data, home
        self.total = len(self._cells)

    @property
    def finished(self) -> int:
        """How many runs have a result."""
        return len(self._home.results(self._cells))

    def jobs(self) -> Iterator[Job]:
        """Yield the runs that have none."""
        for name in self._cells:
            if read_result(self._home.run(name), name) is None:
                yield Job(name)

    def do(self, job: Job, watcher: Watcher) -> None:
        """Do a run."""
        folder = self._home.run(job.name)
        watcher.start(job.name)
        with hold_run(folder):  # who attacks it waits for its end
            result = run_cell(self._cells[job.name], self._data, folder, watcher)
        watcher.finish(format_outcome(result), result.failed is not None)

    def done(self, job: Job) -> None:
        """Do nothing: the result is there."""

    def results(self) -> list[RunResult]:
        """Write the tables of all runs, and return their results."""
        return self._home.write_table(self._cells)


def check_folder(ready: CheckedStudy, folder: Path, *, resume: bool, workers: int, trust: bool) -> None:
    """Refuse, without writing anything, what stands against doing the study in `folder`."""
    if workers > 1 and sys.platform == "win32":  # a process there inherits no descriptors
        raise InvalidInput(f"workers={workers} is not allowed on Windows; expected 1")
    StudyFolder(folder).check(ready.grid, data_digest(ready.data), resume=resume)
    if not trust:
        check_links(folder)
    if ready.search is not None:
        check_search_database(folder, trust)
    _check_keys(ready.grid.cells, folder)


def _check_keys(cells: Iterable[RunSpec], folder: Path) -> None:
    """Refuse keys that would lie in `folder`, the study's own, and computations whose packages are not installed."""
    home = folder.resolve()
    for cell in cells:
        setting = cell.computation
        if setting.secure is not None:
            setting.secure.check_installed()
        if setting.key_folder is not None and home in (path := Path(setting.key_folder).resolve(), *path.parents):
            raise InvalidInput(
                f"{setting.where}: key_folder={setting.key_folder!r} lies in {str(folder)!r}, the folder of the "
                "study, which is copied and shared; keep keys elsewhere"
            )


def worker_command(folder: Path, ready: CheckedStudy) -> list[str]:
    """Return the command of a worker on the study `ready` in `folder`, but for its channel."""
    # A folder's name may begin with a dash.
    given = str(folder.absolute()), ready.code.to_json(), _key_of(ready)
    return [sys.executable, "-m", "splitfed.cli", "_worker", *given]


def run_worker(folder: Path, code: NameResolver, token: str, channel: int) -> None:
    """Work as one of several processes on the study in `folder`, for the one at the other end of `channel`.

    `code`: where import paths may lead, as the process says that has checked all this. `token`: the key of its check,
    on which this process relies if it finds the same study and versions.
    """
    parent = Parent(channel)
    with others_print_aside():
        raw = schema.read_toml(folder / "config.toml", digests.STUDY_CONFIG)
        ready = check_raw(raw, "config.toml", folder, code, "", folder, token)
        StudyFolder(folder).check_data(data_digest(ready.data))
        work = _open_work(ready, folder)
        for job in parent.jobs():
            work.do(job, parent.reports)


def format_outcome(result: RunResult) -> str:
    """Return how a run ended, in a line."""
    if result.failed is not None:
        return f"{result.id}: failed: {result.failed}"
    parts = [f"{result.utility.metric} {result.utility.test:.3f}", f"trained in {result.seconds:.1f} s"]
    for attack in result.attacks:
        metric = next(m for m in METRICS if m in attack.scores)
        score = attack.scores[metric]["attack"].mean
        score_text = "-" if score is None else f"{score:.3g}"
        parts.append(f"{attack.attack} {metric} {score_text} in {attack.seconds:.1f} s")
    return "; ".join([f"{result.id}: {', '.join(parts)}", *remarks(result)])
