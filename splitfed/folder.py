"""A run's folder: what defines it, where it ran, its metrics line by line, its checkpoints and views."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from splitfed import checkpoint
from splitfed.errors import InvalidInput

if TYPE_CHECKING:
    from splitfed.run import Run


class RunFolder:
    """Owns `path`; `claim` refuses one that belongs to something else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, described: Mapping[str, Any], *, resume: bool) -> None:
        """Take the folder for the run `described`; refuse one with another run, or with one not to be resumed."""
        definition = self.path / "run.json"
        if self.path.exists() and not self.path.is_dir():
            raise InvalidInput(f"folder={str(self.path)!r} is a file; give a new or empty folder")
        if definition.is_file():
            there = json.loads(definition.read_text("utf-8"))
            if not resume:
                raise InvalidInput(f"folder {str(self.path)!r} holds a run already; resume it or give another folder")
            for key, value in described.items():
                if there.get(key) != json.loads(json.dumps(value)):
                    raise InvalidInput(
                        f"folder {str(self.path)!r} holds another run: its {key} is {there.get(key)!r}, not {value!r}"
                    )
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise InvalidInput(f"folder {str(self.path)!r} is not empty and holds no run; give a new or empty folder")
        else:
            checkpoint.write_atomic(definition, json.dumps(described, indent=1).encode())
        where = self.path / "environment.json"
        if not where.is_file():
            checkpoint.write_atomic(where, json.dumps(environment(), indent=1).encode())

    def restore(self, run: Run) -> int:
        """Bring `run` to the newest checkpoint and return the number of the next round (0 where there is none)."""
        found = checkpoint.load(self.path / "checkpoints")
        done = 0
        if found is not None:
            number, states = found
            run.load_state(states)
            done = number + 1
        run.history[:] = self.metrics()[:done]
        lines = "".join(json.dumps(entry) + "\n" for entry in run.history)
        checkpoint.write_atomic(self.path / "metrics.jsonl", lines.encode())
        return done

    def save(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Append this round's `metrics`, then save a checkpoint; in this order nothing computed is lost."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())
        checkpoint.save(self.path / "checkpoints", int(metrics["round"]), run.state())

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every round written so far; a line that a crash cut short is left out."""
        path = self.path / "metrics.jsonl"
        entries = []
        for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return entries


def environment() -> dict[str, Any]:
    """Return what a result depends on beside its configuration: versions, machine, commit."""
    packages = ("splitfed", "torch", "numpy", "scipy", "torchmetrics", "optuna")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        # torch itself says which build it is: for the CPU, or for which CUDA.
        "packages": {**{name: _version(name) for name in packages}, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": _commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree, where the package runs from one."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
