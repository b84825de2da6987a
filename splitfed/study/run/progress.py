"""Progress of a study for people: a table of who is at what on a terminal, else one plain line a run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

ProgressEvent = Mapping[str, Any]
"""What has happened, under "event" the name of a method of `Watcher`, and its arguments."""


class Watcher:
    """Contract: receives the progress of a study's runs; what is not overridden is not shown."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def start(self, run: str) -> None:
        """Report that the run called `run` begins or is resumed."""

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Report that `done` of `total` rounds are trained; `epsilon`: privacy cost so far, None without a claim."""

    def attack(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` steps of the attack `name` are done."""

    def finish(self, run: str, line: str, failed: bool = False) -> None:
        """Report that `run` has ended; `line`: its result or failure, for people."""

    def note(self, line: str) -> None:
        """Report what is to be known beside results, such as that a worker has died."""

    def note_once(self, key: str, make: Callable[[], str]) -> None:
        """Report the line that `make` returns, which is not asked again for a `key` that was reported already."""
        if key not in self._said:
            self._said.add(key)
            self.note(make())


class StudyWatcher(Watcher):
    """Contract: the same of several workers: what one of them is at is reported to `worker(number)`."""

    def worker(self, number: int) -> Watcher:
        """Return what receives the progress of the worker with this number, from 0: itself, where all are alike."""
        return self

    def gone(self, number: int) -> None:
        """Report that the worker with this number has ended."""


class Lines(StudyWatcher):
    """One line a run, for logs and pipes."""

    def __init__(self, total: int, finished: int = 0, file: TextIO | None = None) -> None:
        super().__init__()
        self._total, self._done, self._file = total, finished, file

    def finish(self, run: str, line: str, failed: bool = False) -> None:
        """Say how the run ended."""
        self._done += 1
        self.note(f"[{self._done}/{self._total}] {line}")

    def note(self, line: str) -> None:
        """Say it."""
        print(_printable(line), file=self._file or sys.stderr, flush=True)


@dataclass
class Pace:
    """How far something is, `done` of `total`: since `began`, in seconds, when `first` of them were done."""

    began: float
    first: int | None = None
    done: int = 0
    total: int = 0
    last: float = 0.0

    def move(self, done: int, total: int, now: float) -> None:
        """Note that `done` of `total` are done."""
        if self.first is None:
            # What a resumed run had before took no time now.
            self.first = max(done - 1, 0)
        self.done, self.total, self.last = done, total, now

    def left(self, now: float) -> float | None:
        """Return the seconds that the rest takes, at the mean pace so far; None before there is one."""
        if self.first is None or (steps := self.done - self.first) <= 0:
            return None
        whole = (self.last - self.began) / steps * (self.total - self.done)
        return max(0.0, whole - (now - self.last))


class WorkerRow(Watcher):
    """What one worker is at: a row of the table; times are seconds of `clock`."""

    def __init__(self, table: LiveTable, number: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self._table, self._number, self._clock = table, number, clock
        self.run = self.attacked = ""
        self.epsilon: float | None = None
        self.rounds = self.steps = Pace(clock())

    def start(self, run: str) -> None:
        """Show which run it is."""
        self.run, self.attacked, self.epsilon = run, "", None
        self.rounds = Pace(self._clock())

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Show how many rounds there are."""
        self.attacked, self.epsilon = "", epsilon
        self.rounds.move(done, total, self._clock())

    def attack(self, name: str, done: int, total: int) -> None:
        """Show how far the attack is."""
        if name != self.attacked or done == 0:
            self.attacked, self.steps = name, Pace(self._clock())
        self.steps.move(done, total, self._clock())

    def finish(self, run: str, line: str, failed: bool = False) -> None:
        """Leave the line of the run above the table."""
        self.run = self.attacked = ""
        self._table.finish(run, line, failed)

    def note(self, line: str) -> None:
        """Leave the line above the table."""
        self._table.note(line)

    def note_once(self, key: str, make: Callable[[], str]) -> None:
        """Leave the line above the table, the first time."""
        self._table.note_once(key, make)

    def cells(self, now: float) -> list[str]:
        """Return what stands in its row."""
        if not self.run:
            return [str(self._number + 1), "-", "", "", ""]
        rounds = f"{self.rounds.done} of {self.rounds.total}" if self.rounds.total else ""
        rounds += "" if self.epsilon is None else f", epsilon {self.epsilon:.3g}"
        attack = f"{self.attacked} {self.steps.done}/{self.steps.total}" if self.attacked else ""
        left = (self.steps if self.attacked else self.rounds).left(now)
        return [str(self._number + 1), self.run, rounds, attack, _format_left(left)]


class LiveTable(StudyWatcher):
    """A row a worker, and below how many runs are over; lines of runs that have ended stay above."""

    def __init__(
        self, total: int, finished: int, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._total, self._done, self._failed = total, finished, 0
        self._clock, self._console, self._lock = clock, console, threading.Lock()
        self._pace = Pace(clock(), finished, finished, total, clock())
        self._rows: dict[int, WorkerRow] = {}

    def worker(self, number: int) -> WorkerRow:
        """Return the row of a worker, a new one where it is new or was gone."""
        with self._lock:
            return self._rows.setdefault(number, WorkerRow(self, number, self._clock))

    def gone(self, number: int) -> None:
        """Take its row out."""
        with self._lock:
            self._rows.pop(number, None)

    def finish(self, run: str, line: str, failed: bool = False) -> None:
        """Leave the line of the run above the table."""
        with self._lock:
            self._done += 1
            self._failed += failed
            self._pace.done, self._pace.last = self._done, self._clock()
        self.note(line)

    def note(self, line: str) -> None:
        """Leave a line above the table."""
        self._console.print(_printable(line), highlight=False, markup=False)

    def __rich__(self) -> Group:
        """Return the table as it is now."""
        now = self._clock()
        table = Table(
            *(Column(title, overflow="ellipsis", no_wrap=True) for title in ("worker", "run", "round", "attack")),
            Column("time left", justify="right", no_wrap=True),
            box=None,
            header_style="bold",
            pad_edge=False,
        )
        with self._lock:
            for number in sorted(self._rows):
                table.add_row(*(Text(cell) for cell in self._rows[number].cells(now)))
            left = self._pace.left(now)
            failed = f", {self._failed} failed" if self._failed else ""
            rest = "" if left is None or self._done == self._total else f", about {_format_left(left)} left"
            return Group(table, Text(f"{self._done} of {self._total} done{failed}{rest}"))


class Reports(Watcher):
    """Hands every event to `tell` as plain values, for another process, where `relay_event` reads it."""

    def __init__(self, tell: Callable[[ProgressEvent], None]) -> None:
        super().__init__()
        self._tell = tell

    def start(self, run: str) -> None:
        """Report that the run named `run` begins."""
        self._say(event="start", run=run)

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Report that `done` of `total` rounds are trained, and the epsilon spent by then, if there is a claim."""
        self._say(event="round", done=done, total=total, **({} if epsilon is None else {"epsilon": epsilon}))

    def attack(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` steps of the attack `name` are over."""
        self._say(event="attack", name=name, done=done, total=total)

    def finish(self, run: str, line: str, failed: bool = False) -> None:
        """Report that a run is over, with the `line` to print."""
        self._say(event="finish", run=run, line=line, **({"failed": True} if failed else {}))

    def note(self, line: str) -> None:
        """Report a line to print."""
        self._say(event="note", line=line)

    def note_once(self, key: str, make: Callable[[], str]) -> None:
        """Report a line to print, the first time here; who hears several processes prints one of them."""
        if key not in self._said:
            self._said.add(key)
            self._say(event="note_once", key=key, line=make())

    def _say(self, **event: Any) -> None:
        self._tell(event)


def relay_event(event: ProgressEvent, watcher: Watcher) -> None:
    """Tell `watcher` an event of `Reports`."""
    if event["event"] == "note_once":
        watcher.note_once(event["key"], lambda: str(event["line"]))
    else:
        getattr(watcher, event["event"])(**{key: value for key, value in event.items() if key != "event"})


@contextmanager
def open_watcher(total: int, finished: int) -> Iterator[StudyWatcher]:
    """Yield a table, which goes when it ends, where standard error is a terminal, and lines elsewhere."""
    console = Console(stderr=True)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield Lines(total, finished)
        return
    table = LiveTable(total, finished, console)
    with Live(table, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield table


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


def _format_left(seconds: float | None) -> str:
    """Return a time left as hours, minutes and seconds; "-" where it is not known."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _printable(line: str) -> str:
    """Return `line` without what would steer a terminal: a name in it may be somebody else's."""
    return "".join(c if c.isprintable() else "?" for c in line)
