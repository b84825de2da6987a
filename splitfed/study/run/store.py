"""A study's folder: what was asked, the runs, one table of all results, and who may write to them.

Who writes is decided by locks of the operating system, which end with their process: one on the folder for a call that
does its runs, one on a run for each that works on it.
"""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from splitfed.core import digests
from splitfed.core.errors import FolderGone, InvalidInput
from splitfed.study.config import schema
from splitfed.study.config.grid import Grid
from splitfed.study.config.mistakes import short_repr
from splitfed.study.config.toml import dumps
from splitfed.study.results import RunResult, read_result
from splitfed.study.run.results_csv import table_rows
from splitfed.study.trust import is_plain_name
from splitfed.training.checkpoint import make_folder, write_atomic
from splitfed.training.folder import describe_differences, environment

if sys.platform != "win32":
    import fcntl


PATIENCE = 1.0
"""Seconds for which a folder that another process has is asked for: one that was killed has it until it is gone."""
DATA = "data.json"


class StudyFolder:
    """Owns `path`: `check` and `claim` refuse a folder that belongs to something else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, grid: Grid, rows: str, *, resume: bool) -> None:
        """Refuse, without writing, a folder that holds another study, or this one when it is not to be resumed.

        `rows`: the digest of its data, which is a part of what a study is.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InvalidInput(f"folder={str(self.path)!r} is a file; give a new or empty folder")
        if not self.path.is_dir() or not any(self.path.iterdir()) or self._begun():
            return
        config_path = self.path / "config.toml"
        if not config_path.is_file() or not (self.path / "study.toml").is_file():
            raise InvalidInput(f"folder {str(self.path)!r} is not empty and holds no study; give a new or empty folder")
        wanted = tomllib.loads(dumps(grid.resolved))
        there = schema.read_toml(config_path, digests.STUDY_CONFIG)
        if (difference := next(describe_differences("", there, wanted), None)) is not None:
            raise InvalidInput(f"folder {str(self.path)!r} holds another study: {difference}; give another folder")
        if not resume:
            with suppress(OSError), self.lock():  # while another process is at work, nothing can be resumed either
                pass
            raise InvalidInput(f"folder {str(self.path)!r} holds this study already; add --resume to go on with it")
        self.check_data(rows)

    def check_data(self, rows: str) -> None:
        """Refuse a study of which any run was trained on other data than those with the digest `rows`."""
        known = self.path / DATA
        begun = digests.read(known, "delete it: it is written anew").get("data_digest") if known.is_file() else rows
        runs = sorted(path.parent.name for path in (self.path / "runs").glob("*/result.json"))
        if any(digest not in (None, rows) for digest in [begun, *(found.data_digest for found in self.results(runs))]):
            raise InvalidInput(
                f"folder {str(self.path)!r} holds this study on other data: what it reads has changed since; put back "
                "the data that it was begun with, or give another folder"
            )

    def _begun(self) -> bool:
        """Return whether nothing is there but what `lock` and `claim` write first: a crash came between."""
        found = {entry.name.removeprefix(".").removesuffix(".tmp") for entry in self.path.iterdir()}
        begun = "lock" in found and found <= {"lock", "environment.json", "config.toml", "study.toml", DATA}
        return begun and not (self.path / "study.toml").is_file()

    def claim(self, grid: Grid, text: str, rows: str) -> None:
        """Write what the study is, `text` being the file as the user wrote it and `rows` the digest of its data."""
        if not (self.path / DATA).is_file():
            write_atomic(self.path / DATA, digests.json_with_digest({"data_digest": rows}))
        if (self.path / "study.toml").is_file():
            return
        write_atomic(self.path / "environment.json", digests.json_with_digest(environment()))
        write_atomic(self.path / "config.toml", digests.toml_with_digest(dumps(grid.resolved)))
        write_atomic(self.path / "study.toml", text.encode())

    @contextmanager
    def lock(self) -> Iterator[int | None]:
        """Keep other processes off the study inside the block; yields a descriptor that workers inherit.

        The lock lives as long as any process holds the descriptor, so workers that outlive a crash keep it too. Raises
        `InvalidInput` where another process has it for longer than `PATIENCE`.
        """
        make_folder(self.path)
        if sys.platform == "win32":  # two processes on one folder are not kept apart there
            yield None
            return
        with (self.path / ".lock").open("a") as file:
            limit = time.monotonic() + PATIENCE
            while not _take(file):
                if time.monotonic() > limit:
                    raise InvalidInput(f"another process is at work in {str(self.path)!r}; wait for it to end")
                time.sleep(0.02)
            yield file.fileno()

    def run(self, name: str) -> Path:
        """Return the folder of the run called `name`; refuse one that would lie elsewhere."""
        if not is_plain_name(name):
            raise InvalidInput(f"run {short_repr(name)} of {str(self.path)!r} is not allowed; expected a name, no path")
        return self.path / "runs" / name

    def results(self, names: Iterable[str]) -> list[RunResult]:
        """Return the results of those runs that have one, in the order of `names`."""
        return [found for name in names if (found := read_result(self.run(name), name)) is not None]

    def write_table(self, names: Iterable[str]) -> list[RunResult]:
        """Write results.csv and results.parquet, a row a run in `names` and attack; return their results."""
        # pandas takes half a second to import.
        import pandas as pd

        with _hold(self.path / ".turn"):  # between reading and writing nobody else's row may come in
            results = self.results(names)
            table = pd.DataFrame([row for found in results for row in table_rows(found)])
            write_atomic(self.path / "results.csv", table.to_csv(index=False).encode())
            write_atomic(self.path / "results.parquet", table.to_parquet(index=False))
        return results


def study_of(folder: Path) -> Path | None:
    """Return the folder of the study that the run in `folder` belongs to, None for a run that was moved out of it."""
    home = folder.resolve().parent.parent
    return home if (home / "study.toml").is_file() else None


@contextmanager
def hold_run(folder: Path) -> Iterator[None]:
    """Let nobody else write to the run in `folder` inside the block; who does so now is waited for."""
    home = study_of(folder)
    place, name = (folder.resolve(), "run") if home is None else (home, folder.resolve().name)
    (place / ".locks").mkdir(exist_ok=True)
    with _hold(place / ".locks" / f"{name}.lock"):
        yield


@contextmanager
def _hold(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path` inside the block; another process or thread that has it is waited for."""
    if not path.parent.is_dir():
        raise FolderGone(path.parent)
    with path.open("w") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _take(file: IO[str]) -> bool:
    """Return whether this process now has the lock of `file`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
