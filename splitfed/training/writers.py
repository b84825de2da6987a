"""Callbacks that write what a run measures: a CSV file, TensorBoard, Weights & Biases; none changes the run.

Each writes the columns of `Run.to_frame` after every round, and the mean scores of every attack. A run that is resumed
goes on in the same place, and a round that a crash had cut short is written once.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, check_names
from splitfed.planning.validation import Prepared
from splitfed.threats.attack_result import AttackResult
from splitfed.training.callbacks import Callback
from splitfed.training.checkpoint import write_atomic
from splitfed.training.frames import round_row
from splitfed.training.run import Run


@guard_constructor
class CsvWriter(Callback):
    """Writes a row a round into the CSV file `path`, which it replaces; complete after every round."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []

    def check(self, prepared: Prepared) -> None:
        """Refuse a path where no file can be."""
        if self.path.is_dir():
            raise InvalidInput(f"path={str(self.path)!r} is a folder; CsvWriter needs a file")

    def on_start(self, run: Run) -> None:
        """Let the first round that ends write the file anew, with those that a resumed run has already."""
        self._columns = []

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Add the row of the round; where it has new columns, the file is written anew."""
        row = round_row(metrics)
        if not set(row) <= set(self._columns):
            self._write_all(run)
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def on_end(self, run: Run) -> None:
        """Write the file anew: the last round may say more than when it ended."""
        self._write_all(run)

    def _write_all(self, run: Run) -> None:
        rows = [round_row(entry) for entry in run.history]
        self._columns = list(dict.fromkeys(column for row in rows for column in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(self.path, text.getvalue().encode())


@guard_constructor
class TensorBoardWriter(Callback):
    """Writes event files for TensorBoard into `folder`; needs the extra splitfed[tensorboard].

    A step is a round, from 0; an attack's scores stand at the last round.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def check(self, prepared: Prepared) -> None:
        """Refuse to go on without the package."""
        _load_extra("torch.utils.tensorboard", "tensorboard")

    def on_start(self, run: Run) -> None:
        """Open an event file; what an earlier one holds of later rounds no longer counts."""
        module = _load_extra("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(self.folder), purge_step=len(run.history))

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of the round."""
        for name, value in _scalars(metrics):
            self._writer.add_scalar(name, value, metrics["round"])
        self._writer.flush()

    def on_attack_end(self, run: Run, result: AttackResult) -> None:
        """Write the mean scores of the attack."""
        if self._writer is None:
            return
        for name, value in _attack_scalars(result):
            self._writer.add_scalar(name, value, max(0, len(run.history) - 1))
        self._writer.flush()

    def on_end(self, run: Run) -> None:
        """Write what is left; the writer stays open for attacks."""
        self._writer.flush()


@guard_constructor
class WandbWriter(Callback):
    """Logs to Weights & Biases; needs the extra splitfed[wandb].

    `project`, `name`: as there. `mode`: "offline" (default: into `folder`, nothing leaves the machine), "online" or
    "disabled". `id`: of the run there, by which a resumed run goes on with it.
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        folder: str | Path = ".",
        mode: str = "offline",
        id: str | None = None,
    ) -> None:
        check_names("mode", ("offline", "online", "disabled"), mode)
        self.project, self.name, self.folder, self.mode, self.id = project, name, Path(folder), mode, id
        self._run: Any = None

    def check(self, prepared: Prepared) -> None:
        """Refuse to go on without the package."""
        _load_extra("wandb", "wandb")

    def on_start(self, run: Run) -> None:
        """Open a run there, with what defines this one as its configuration."""
        self._run = _load_extra("wandb", "wandb").init(
            project=self.project,
            name=self.name,
            dir=str(self.folder),
            mode=self.mode,
            id=self.id,
            resume=None if self.id is None else "allow",
            config=dict(run.summary().rows),
        )

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Log the numbers of the round."""
        # Left to itself a round is kept back until the next one comes.
        self._run.log(dict(_scalars(metrics)), step=metrics["round"], commit=True)

    def on_attack_end(self, run: Run, result: AttackResult) -> None:
        """Log the mean scores of the attack, as a summary."""
        if self._run is not None:
            self._run.summary.update(dict(_attack_scalars(result)))

    def state(self) -> dict[str, Any]:
        """The id of the run there, so that a resumed run goes on with it."""
        return {} if self._run is None else {"id": str(self._run.id)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that was begun."""
        self.id = self.id or state["id"]

    def finish(self) -> None:
        """Close the run there; nothing more can be logged."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a round by the columns of `Run.to_frame`."""
    for name, value in round_row(metrics).items():
        if name != "round" and isinstance(value, (int, float)):
            yield name, float(value)


def _attack_scalars(result: AttackResult) -> Iterator[tuple[str, float]]:
    for row in result.rows():
        yield f"attack_{row['attack']}/{row['metric']}_{row['of']}", row["mean"]


def _load_extra(module: str, extra: str) -> Any:
    """Return the module; refuse in a line where its package is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        why = " ".join(str(error).split())
        raise InvalidInput(f"the package {extra} cannot be imported ({why}): install splitfed[{extra}]") from error
