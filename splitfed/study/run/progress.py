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
"""What has happened, under "event" the name of a method of `Watcher`, and its arguments: plain values."""


class Watcher:
    """Contract: `tell` receives every event of a study's runs; each other method words one, and hands it to `tell`.

    `tell`: given, it receives the events in place of the method, say to send them to another process.
    """

    def __init__(self, tell: Callable[[ProgressEvent], None] | None = None) -> None:
        self._told: set[str] = set()
        self.tell = tell or self.show_event

    def show_event(self, event: ProgressEvent) -> None:
        """Show an event; by default nothing is shown."""

    def start(self, run: str) -> None:
        """Report that the run called `run` begins or is resumed."""
        self.tell({"event": "start", "run": run})

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Report that `done` of `total` rounds are trained; `epsilon`: privacy cost so far, None without a claim."""
        self.tell({"event": "round", "done": done, "total": total, "epsilon": epsilon})

    def attack(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` steps of the attack `name` are done."""
        self.tell({"event": "attack", "name": name, "done": done, "total": total})

    def finish(self, line: str, failed: bool = False) -> None:
        """Report that a run has ended; `line`: its result or failure, for people."""
        self.tell({"event": "finish", "line": line, "failed": failed})

    def note(self, line: str) -> None:
        """Report what is to be known beside results, such as that a worker has died."""
        self.tell({"event": "note", "line": line, "key": None})

    def note_once(self, key: str, make: Callable[[], str]) -> None:
        """Report the line that `make` returns, which is not asked again for a `key` that was reported already."""
        if key not in self._told:
            self._told.add(key)
            self.tell({"event": "note", "line": make(), "key": key})


class StudyWatcher(Watcher):
    """Contract: the same of `total` runs by several workers, of which `finished` are over; `show_line` shows a line."""

    def __init__(self, total: int, finished: int = 0) -> None:
        super().__init__()
        self._total, self._done, self._failed = total, finished, 0
        self._shown: set[str | None] = set()

    def show_event(self, event: ProgressEvent) -> None:
        """Count runs that have ended, and show lines; of notes with one key the first."""
        match event:
            case {"event": "finish"}:
                self._done += 1
                self._failed += event.get("failed", False)
                self.show_line(event["line"], self._done)
            case {"event": "note", "key": key} if key not in self._shown:
                self._shown |= {key} - {None}
                self.show_line(event["line"])

    def show_line(self, line: str, number: int | None = None) -> None:
        """Show a line, that of the end of the run with this `number` or a note."""

    def worker(self, number: int) -> Watcher:
        """Return what receives the progress of the worker with this number, from 0: itself, where all are alike."""
        return self

    def gone(self, number: int) -> None:
        """Report that the worker with this number has ended."""


class Lines(StudyWatcher):
    """One line a run, for logs and pipes."""

    def __init__(self, total: int, finished: int = 0, file: TextIO | None = None) -> None:
        super().__init__(total, finished)
        self._file = file

    def show_line(self, line: str, number: int | None = None) -> None:
        """Print it, with its number in front where a run has ended."""
        count = "" if number is None else f"[{number}/{self._total}] "
        print(_printable(count + line), file=self._file or sys.stderr, flush=True)


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

    def show_event(self, event: ProgressEvent) -> None:
        """Show how far the run is; leave lines above the table."""
        now = self._clock()
        match event:
            case {"event": "start", "run": run}:
                self.run, self.attacked, self.epsilon, self.rounds = run, "", None, Pace(now)
            case {"event": "round", "done": done, "total": total}:
                self.attacked, self.epsilon = "", event.get("epsilon")
                self.rounds.move(done, total, now)
            case {"event": "attack", "name": name, "done": done, "total": total}:
                if name != self.attacked or done == 0:
                    self.attacked, self.steps = name, Pace(now)
                self.steps.move(done, total, now)
            case _:
                self.run = self.run if event["event"] == "note" else ""
                self._table.tell(event)

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
        super().__init__(total, finished)
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

    def show_line(self, line: str, number: int | None = None) -> None:
        """Leave a line above the table, and the pace of runs where one has ended."""
        if number is not None:
            with self._lock:
                self._pace.done, self._pace.last = number, self._clock()
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
