"""Progress of a study for people: bars with the time left on a terminal, else one plain line a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Watcher(Protocol):
    """Contract: receives the progress of a study's runs and shows it."""

    def start(self, run: str) -> None:
        """Report that the run called `run` begins or is resumed."""

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Report that `done` of `total` rounds are trained; `epsilon`: privacy cost so far, None without a claim."""

    def attack(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` steps of the attack `name` are done."""

    def finish(self, run: str, line: str) -> None:
        """Report that `run` has ended; `line`: its result or failure, for people."""


class Lines:
    """One line a run, for logs and pipes."""

    def __init__(self, total: int, finished: int = 0, file: TextIO | None = None) -> None:
        self._total, self._done, self._file = total, finished, file

    def start(self, run: str) -> None:
        """Say nothing."""

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Say nothing."""

    def attack(self, name: str, done: int, total: int) -> None:
        """Say nothing."""

    def finish(self, run: str, line: str) -> None:
        """Say how the run ended."""
        self._done += 1
        print(f"[{self._done}/{self._total}] {line}", file=self._file or sys.stderr, flush=True)


class Bars:
    """Bars for the runs, for the rounds of the current one, and for its attacks."""

    def __init__(self, total: int, finished: int = 0) -> None:
        self.display = Progress(
            TextColumn("{task.description}", justify="left"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._runs = self.display.add_task("runs", total=total, completed=finished)
        self._rounds = self.display.add_task("rounds", visible=False)
        self._attacks = self.display.add_task("attack", visible=False)

    def start(self, run: str) -> None:
        """Show which run it is."""
        self.display.update(self._runs, description=f"runs: {run}")

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Move the bar of the rounds."""
        if done <= 1:
            self.display.reset(self._rounds)
        label = "rounds" if epsilon is None else f"rounds, epsilon {epsilon:.3g}"
        self.display.update(self._rounds, description=label, completed=done, total=total, visible=True)
        self.display.update(self._attacks, visible=False)

    def attack(self, name: str, done: int, total: int) -> None:
        """Move the bar of the attack."""
        if done == 0:
            self.display.reset(self._attacks)
        self.display.update(self._attacks, description=name, completed=done, total=total, visible=True)

    def finish(self, run: str, line: str) -> None:
        """Leave the line of the run above the bars."""
        self.display.console.print(line, highlight=False, markup=False)
        self.display.advance(self._runs)


class Reports:
    """Tells another process: one line of JSON an event, read back by `relay_event`."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout

    def start(self, run: str) -> None:
        """Report that the run named `run` begins."""
        self._say(event="start", run=run)

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Report that `done` of `total` rounds are trained, and the epsilon spent by then, if there is a claim."""
        self._say(event="round", done=done, total=total, **({} if epsilon is None else {"epsilon": epsilon}))

    def attack(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` steps of the attack `name` are over."""
        self._say(event="attack", name=name, done=done, total=total)

    def finish(self, run: str, line: str) -> None:
        """Report that a run is over, with the `line` to print."""
        self._say(event="finish", run=run, line=line)

    def _say(self, **event: Any) -> None:
        print(json.dumps(event), file=self._file, flush=True)


def relay_event(line: str, watcher: Watcher) -> None:
    """Tell `watcher` the event that another process wrote as `line`."""
    event: Mapping[str, Any] = json.loads(line)
    getattr(watcher, event["event"])(**{key: value for key, value in event.items() if key != "event"})


@contextmanager
def open_watcher(total: int, finished: int) -> Iterator[Watcher]:
    """Yield bars, which go when it ends, where standard error is a terminal, and lines elsewhere."""
    if not sys.stderr.isatty():
        yield Lines(total, finished)
        return
    bars = Bars(total, finished)
    with bars.display:
        yield bars


@contextmanager
def open_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield what to tell how much of a total is done, which a bar shows; None where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        bar = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
