"""Progress of a training for people: a bar with the time left on a terminal or in a notebook, else a line a round."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from splitfed.training.callbacks import Callback
from splitfed.training.run import Run


class ProgressBar(Callback):
    """Shows on standard error how many rounds are done, the newest scores, and the time left.

    A notebook shows the bar where the package ipywidgets is installed.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._began, self._first, self._total = 0.0, 0, 0

    def on_start(self, run: Run) -> None:
        """Show the rounds that a resumed run has already."""
        self._began, self._first = time.monotonic(), len(run.history)
        self._total = run.plan.rounds
        console = Console(file=sys.stderr)
        if console.is_terminal or console.is_jupyter:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._bar.add_task("rounds", total=self._total, completed=self._first)
            self._bar.start()

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Move the bar, or say in a line what the round came to."""
        done, said = metrics["round"] + 1, _describe(metrics)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=said)
            return
        left = (time.monotonic() - self._began) / (done - self._first) * (self._total - done)
        print(f"round {done} of {self._total}: {said}, {left:.0f} s left", file=sys.stderr, flush=True)  # noqa: T201

    def on_end(self, run: Run) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _describe(metrics: Mapping[str, Any]) -> str:
    said = [] if metrics["loss"] is None else [f"loss {metrics['loss']:.4g}"]
    for part in ("validation", "test"):
        found = metrics.get(part) or {}
        if found.get("union") is not None:
            return ", ".join([*said, f"{part} {found['metric']} {found['union']:.4g}"])
    return ", ".join(said) or "no loss"
