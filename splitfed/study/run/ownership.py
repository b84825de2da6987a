"""Who is at a run or a trial: a lock of the operating system on a file, which ends with its process, not by a clock.

A process or a machine that was suspended finds its lock as it left it. Where a lock can get lost all the same, as on
some network file systems or with its file deleted, its former holder notices before it writes anything.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from splitfed.core.errors import FolderGone, SplitfedError

if sys.platform != "win32":
    import fcntl

MOST_DEATHS = 3
"""How many processes may die at one run or trial in one call; then it is left out."""


class LostRun(SplitfedError):
    """Another process is at the run or trial that this one held."""


def new_call() -> str:
    """Return a mark for a call of `splitfed run`, by which its processes know what others of it have taken."""
    return os.urandom(8).hex()


class Claim:
    """A run or trial that this process holds by the lock file at `path`, until `release`, its block or its end."""

    def __init__(self, path: Path, descriptor: int, content: bytes) -> None:
        self.path, self._descriptor, self._content = path, descriptor, content

    def check(self) -> None:
        """Raise `LostRun` unless this process holds it still: to be asked before anything is written."""
        if sys.platform == "win32":
            return
        try:
            # On what is held already this does nothing; what was lost and taken by another process it refuses.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there, own = os.stat(self.path), os.fstat(self._descriptor)
            same_file = (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
            held = same_file and os.pread(self._descriptor, len(self._content) + 1, 0) == self._content
        except OSError:
            held = False
        if not self.path.parent.is_dir():
            raise FolderGone(self.path.parent.parent)
        if not held:
            raise LostRun(f"{self.path.name} is held by another process now, which goes on with it")

    def release(self) -> None:
        """Let go of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Locks:
    """The lock files of a study's `folder`; `call`: a mark of this call of `splitfed run`, which its workers share."""

    def __init__(self, folder: Path, call: str) -> None:
        self._folder, self._call = folder, call

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one process of the folder at a time choose what it takes: SQLite cannot lock one row."""
        if not self._folder.is_dir():
            raise FolderGone(self._folder)
        with (self._folder / ".turn").open("w") as file:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def claim(self, name: str, *, wait: bool = False) -> Claim | None:
        """Take the lock called `name` and count that; None where a process, this one too, has it, unless `wait`."""
        path = self._path(name)
        path.parent.mkdir(exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if sys.platform != "win32":
                    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                times = self._times(os.pread(descriptor, 4096, 0)) + 1 if sys.platform != "win32" else 1
                content = json.dumps({"call": self._call, "times": times, "owner": os.urandom(8).hex()}).encode()
                os.truncate(descriptor, 0)
                os.write(descriptor, content)
                found = Claim(path, descriptor, content)
                found.check()
            except (BlockingIOError, LostRun) as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return None
                # Its file was deleted between opening and locking it.
            except BaseException:
                os.close(descriptor)
                raise
            else:
                return found

    def is_held(self, name: str) -> bool:
        """Return whether a process holds the lock called `name`; to be asked in a `turn`."""
        if sys.platform == "win32" or not self._path(name).is_file():
            return False
        with self._path(name).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def deaths(self, name: str) -> int:
        """Return how many processes have taken `name` in this call; of one that nobody holds, all of them died."""
        with suppress(FileNotFoundError):
            return self._times(self._path(name).read_bytes())
        return 0

    def _path(self, name: str) -> Path:
        return self._folder / ".locks" / f"{name}.lock"

    def _times(self, content: bytes) -> int:
        """Return how often it was taken in this call, by what a lock file says; what it says otherwise is nothing."""
        try:
            found = json.loads(content)
            return int(found["times"]) if found["call"] == self._call else 0
        except (ValueError, TypeError, KeyError):
            return 0


def study_of(folder: Path) -> Path | None:
    """Return the folder of the study that the run in `folder` belongs to, None for a run that was moved out of it."""
    home = folder.resolve().parent.parent
    return home if (home / "study.toml").is_file() else None


@contextmanager
def hold_run(folder: Path) -> Iterator[None]:
    """Let nobody else write to the finished run in `folder` inside the block; who does so now is waited for."""
    home = study_of(folder)
    place, name = (folder.resolve(), "run") if home is None else (home, folder.resolve().name)
    claim = Locks(place, new_call()).claim(name, wait=True)
    assert claim is not None
    with claim:
        yield
