"""The work of an attack before it begins: pieces that grow with a size, a little of which can be done and timed.

How long an attack with doublings or searches takes is not known beforehand, for its results decide when it stops:
least and most are, in units of its own work. What a unit takes is measured where the attack is to run, never taken from
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from splitfed.attacks.knowledge import Knowledge
from splitfed.core.messages import View

BATCHES = 8
"""Batches of rows that a piece of work is timed on."""
MEASURED = 0.1
"""Seconds by which twice a size must take longer before the difference is scaled: a smaller one is the clock's own."""


@dataclass(frozen=True)
class Work:
    """Work that grows in proportion to its size: `run(size)` does as much of it, on the share `share` of the rows.

    `least`, `most`: its sizes altogether, over all attempts. `attempts`: how often it is begun, at least and at most;
    what beginning takes is paid every time. Work without a size (0) takes what beginning takes. `timed`: the size at
    which it is timed first; it is doubled until that takes `MEASURED` longer, or all of the work is done. `measured`:
    seconds to begin, and of a unit, of each measurement; what `replace` makes of a piece has the same.
    """

    run: Callable[[int], object]
    least: float
    most: float
    attempts: tuple[int, int] = (1, 1)
    share: float = 1.0
    timed: int = 1
    measured: list[tuple[float, float]] = field(default_factory=list, compare=False, repr=False)

    def seconds(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Return what it takes at least and at most by `clock`: by the faster and by the slower of two measurements."""

        def took(size: int) -> float:
            started = clock()
            self.run(size)
            return clock() - started

        if self.most == 0:
            start = min(took(0) for _ in range(2))
            return start * self.attempts[0], start * self.attempts[1]
        if not self.measured:
            took(self.timed)  # the first run imports and compiles
            size, once, twice = self.timed, took(self.timed), took(2 * self.timed)
            while twice - once < MEASURED and 2 * size < self.most:
                size, once, twice = 2 * size, twice, took(4 * size)
            for short, long in ((once, twice), (took(size), took(2 * size))):
                unit = max(long - short, 0.0) / size
                self.measured.append((max(long - unit * 2 * size, 0.0), unit))
        least = min(unit * self.least + start * self.attempts[0] for start, unit in self.measured)
        most = max(unit * self.most + start * self.attempts[1] for start, unit in self.measured)
        return least / self.share, most / self.share


@dataclass(frozen=True)
class OneOf:
    """Work of which one alone of `options` will be done, each of several pieces: the least of them to the most."""

    options: Sequence[Sequence[Work | OneOf]]

    def seconds(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Return what it takes at least and at most by `clock`."""
        sums = [
            [sum(ends) for ends in zip(*(one.seconds(clock) for one in pieces), strict=True)] for pieces in self.options
        ]
        return min(least for least, _ in sums), max(most for _, most in sums)


@runtime_checkable
class StatesWork(Protocol):
    """An attack that says what its work is before it begins."""

    def work(self, view: View, knowledge: Knowledge) -> Sequence[Work | OneOf]:
        """Return the pieces of its work on what it would be given."""
        ...
