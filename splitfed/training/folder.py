"""A run's folder: what defines it, where it ran, its metrics line by line, its checkpoints and views."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from splitfed.core import digests
from splitfed.core.digests import Damaged
from splitfed.core.errors import FolderGone, InvalidInput, short
from splitfed.training import checkpoint, identity

if sys.platform != "win32":
    import fcntl


class Resumable(Protocol):
    """What a folder keeps of a run: its history, a line a round, and its state."""

    history: list[dict[str, Any]]

    def state(self) -> dict[str, Any]:
        """Return all that the run needs to go on from here."""

    def load_state(self, states: dict[str, Any]) -> None:
        """Go back to `states`."""


class EqualNoise(UserWarning):
    """A private run draws the noise of another one on the same rows."""


DIGESTS = {
    "weights": "are those of another start than the model given has: give one with the weights that it began with, "
    "from the same seed or file and not trained since",
    "rows": "are not those of the data given: give the same rows, split by the same arguments and seed",
    "module": "is not what the model given has there: give one of the same layers with the same settings",
}
"""What a description holds by its digest -> what is said of another one."""


class RunFolder:
    """Owns `path`; `claim` refuses one that belongs to something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # What stands for the beginning of the metrics, and for all of them up to now.
        self._start = self._chain = ""
        self._kept: bytes | None = None

    def claim(self, described: Mapping[str, Any], *, resume: bool) -> None:
        """Take the folder for the run `described`; refuse one with another run, or with one not to be resumed."""
        definition = self.path / "run.json"
        if self.path.exists() and not self.path.is_dir():
            raise InvalidInput(f"folder={str(self.path)!r} is a file; give a new or empty folder")
        if definition.is_file():
            if not resume:
                raise InvalidInput(f"folder {str(self.path)!r} holds a run already; resume it or give another folder")
            there = digests.read(definition, digests.RETRAIN)
            self._check_same(self.read_definition(), json.loads(json.dumps(described)))
        elif is_run_without_definition(self.path):
            raise InvalidInput(f"{definition} is missing; {digests.RETRAIN}")
        elif self.path.is_dir() and any(entry.name != ".run.json.tmp" for entry in self.path.iterdir()):
            raise InvalidInput(f"folder {str(self.path)!r} is not empty and holds no run; give a new or empty folder")
        else:
            there = dict(described)
            if twins := self._runs_of_equal_noise(there):
                warnings.warn(_equal_noise_text(twins, there["training"]["seed"]), EqualNoise, stacklevel=3)
            checkpoint.write_atomic(definition, digests.json_with_digest(there))
        where = self.path / "environment.json"
        if where.is_file():
            digests.read(where, "delete it: it is written anew when the run is resumed")
        else:
            checkpoint.write_atomic(where, digests.json_with_digest(environment()))
        self._start = self._chain = digests.content(there)

    @contextmanager
    def alone(self, *, reads: bool = False) -> Iterator[None]:
        """Keep others from training in the folder inside the block, which makes it where it is missing.

        `reads`: whether others may read at the same time. Raises `InvalidInput` where somebody trains there, in another
        process or thread. No claim where the file system has no locks.
        """
        missing = not self.path.exists()
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            with ExitStack() as ends:
                # Of the system, on the folder itself: it ends with its process, and leaves no file.
                with suppress(OSError):
                    descriptor = os.open(self.path, os.O_RDONLY)
                    ends.callback(os.close, descriptor)
                    try:
                        if sys.platform != "win32":
                            fcntl.flock(descriptor, (fcntl.LOCK_SH if reads else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    except BlockingIOError:
                        where = str(self.path)
                        raise InvalidInput(f"folder {where!r} is being trained in; wait for that to end") from None
                yield
        finally:
            with suppress(OSError):
                if missing:  # what is refused leaves nothing behind; a folder with a run in it stays
                    self.path.rmdir()

    def restore(self, run: Resumable) -> int:
        """Bring `run` to the newest checkpoint and return the number of the next round (0 where there is none)."""
        newest = checkpoint.load(self.path / "checkpoints")
        done = 0 if newest is None else newest.number + 1
        if newest is not None and newest.damaged:
            text = f"{newest.damaged[0]} is damaged; the run goes on from the checkpoint of round {newest.number}"
            warnings.warn(text, UserWarning, stacklevel=3)
        path = self.path / "metrics.jsonl"
        if done and not path.is_file():
            raise InvalidInput(f"{path} is missing; {digests.RETRAIN}")
        content = path.read_bytes() if path.is_file() else b""
        entries = list(digests.links(content, self._start))
        lines = entries[:done]
        if len(lines) < done:
            raise Damaged(path, digests.RETRAIN, f"the line of round {len(lines)} does not match its digest")
        self._chain = lines[-1][1] if lines else self._start
        if newest is not None:
            if self._chain != newest.metrics:
                raise Damaged(path, digests.RETRAIN, f"it does not belong to the checkpoint of round {newest.number}")
            run.load_state(newest.states)
        # A crash leaves one line more than there are checkpoints.
        if len(entries) > done + 1 and not (newest and newest.damaged):
            text = f"checkpoints of rounds {done} to {len(entries) - 1} are missing; the run goes on with round {done}"
            warnings.warn(text, UserWarning, stacklevel=3)
        run.history[:] = [entry for entry, _ in lines]
        # Rounds after the checkpoint, and what a crash left of a line, are written again once there is a next round.
        whole = b"".join(line + b"\n" for line in content.split(b"\n")[:done])
        self._kept = whole if whole != content else None
        return done

    def check_opened(self) -> None:
        """Refuse a run of which rounds were told and have no checkpoint any more: nothing trains them here."""
        newest, told = checkpoint.newest_round(self.path / "checkpoints"), len(self.metrics())
        if newest + 1 < told:
            raise InvalidInput(
                f"folder {str(self.path)!r} holds no checkpoint of its last round, {told - 1}, any more: put it back, "
                "or train the run again from what is left by resume=True"
            )

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every round written so far; a line that a crash cut short is left out.

        Raises `Damaged` where a line is not what was written.
        """
        path, definition = self.path / "metrics.jsonl", self.path / "run.json"
        if not path.is_file() or not definition.is_file():
            return []
        content = path.read_bytes()
        start = digests.content(digests.read(definition, digests.RETRAIN))
        entries = [entry for entry, _ in digests.links(content, start)]
        if len(entries) < content.count(b"\n"):
            raise Damaged(path, digests.RETRAIN, f"the line of round {len(entries)} does not match its digest")
        return entries

    def save(self, run: Resumable, metrics: Mapping[str, Any]) -> Path:
        """Append this round's `metrics`, then save a checkpoint; in this order nothing computed is lost.

        Returns the folder of the checkpoint.
        """
        line = digests.link(self._chain, metrics)
        self._chain = digests.chain(self._chain, metrics)
        self.check_there()
        if self._kept is not None:
            checkpoint.write_atomic(self.path / "metrics.jsonl", self._kept)
            self._kept = None
        with (self.path / "metrics.jsonl").open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        return checkpoint.save(self.path / "checkpoints", int(metrics["round"]), run.state(), self._chain)

    def check_there(self) -> None:
        """Raise `FolderGone` where the folder is not there any more, before it would be made anew."""
        if not (self.path / "run.json").is_file():
            raise FolderGone(self.path)

    def lengthen(self, rounds: int) -> None:
        """Note that the run is to have `rounds` rounds in all, more than it began with."""
        checkpoint.write_atomic(self.path / "rounds.json", digests.json_with_digest({"rounds": rounds}))

    def read_definition(self) -> dict[str, Any]:
        """Return what defines the run, with the rounds that it is to have by now."""
        longer = self.path / "rounds.json"
        there = digests.read(self.path / "run.json", digests.RETRAIN)
        return there if not longer.is_file() else there | digests.read(longer, digests.RETRAIN)

    def _runs_of_equal_noise(self, described: Mapping[str, Any]) -> list[str]:
        """Return the folders beside this one of other private runs on the same data, with the same seed."""
        twins, mine = [], json.loads(json.dumps(described))
        for definition in sorted(self.path.absolute().parent.glob("*/run.json")) if "private" in described else ():
            try:
                there = digests.read(definition, digests.RETRAIN) if definition.is_file() else {}
                # The very same run again releases nothing new.
                same = bool(there.get("private")) and _data_and_seed(there) == _data_and_seed(mine) and there != mine
            except (OSError, InvalidInput, KeyError, TypeError):
                continue  # somebody else's file, or a damaged one: told where it is opened
            twins += [definition.parent.name] if same else []
        return twins

    def _check_same(self, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Refuse a run that is described otherwise."""
        for key, value in wanted.items():
            # Cuts by the same names are the same cuts, whoever chose them.
            if key not in ("code", "cut_choice", "told", "private") and there.get(key) != value:
                difference = next(describe_differences(key, there.get(key), value))
                way = "give another folder"
                if key == "rounds":
                    way += ", or train it for more by continue_training of the run that was resumed"
                raise InvalidInput(f"folder {str(self.path)!r} holds another run: {difference}; {way}")
        if changed := identity.differences(there.get("code", {}), wanted.get("code", {})):
            raise InvalidInput(
                f"folder {str(self.path)!r} holds another run: {digests.names(changed)} changed since it began; "
                "go back to what it was, or give another folder"
            )


def is_run_without_definition(path: Path) -> bool:
    """Return whether a run has written to the folder `path`, and what defines it is gone."""
    return (path / "checkpoints").is_dir() and (path / "metrics.jsonl").is_file() and not (path / "run.json").is_file()


def describe_differences(where: str, there: Any, wanted: Any) -> Iterator[str]:
    """Say where two plain values differ: `its data.clients is 1, not 2`."""
    if isinstance(there, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys([*there, *wanted]):
            yield from describe_differences(f"{where}.{key}", there.get(key), wanted.get(key))
    elif isinstance(there, list) and isinstance(wanted, list) and len(there) == len(wanted):
        for i, pair in enumerate(zip(there, wanted, strict=True)):
            yield from describe_differences(f"{where}[{i}]", *pair)
    elif there != wanted and (said := DIGESTS.get(where.rpartition(".")[2])) and _are_digests(there, wanted):
        yield f"its {where.removeprefix('.')} {said}"
    elif there != wanted:
        yield f"its {where.removeprefix('.')} is {short(there)}, not {short(wanted)}"


def _are_digests(*values: Any) -> bool:
    return all(isinstance(one, str) and re.fullmatch("[0-9a-f]{16,}", one) for one in values)


def _data_and_seed(described: Mapping[str, Any]) -> tuple[Any, Any]:
    return described["data"]["rows"], described["training"]["seed"]


def _equal_noise_text(twins: Sequence[str], seed: int) -> str:
    others = f" and {len(twins) - 1} more" if len(twins) > 1 else ""
    return (
        f"run {twins[0]!r}{others} beside this one drew private noise from the same seed={seed} on the same rows: what "
        "both release shows more than their ledgers say, as equal noise cancels; publish one of them, or give another "
        "seed"
    )


def environment() -> dict[str, Any]:
    """Return what a result depends on beside its configuration: versions, machine, commit."""
    packages = ("splitfed", "torch", "numpy", "scipy", "optuna")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        # torch itself says which build it is: for the CPU, or for which CUDA.
        "packages": {**{name: _version(name) for name in packages}, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": _commit(),
    }


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def _commit() -> str | None:
    """The commit of the source tree, where the package runs from one, when this process first asked."""
    here = Path(__file__).resolve().parents[1]
    if not (here.parent / ".git").exists():
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
