"""Estimates of an attack's work: pieces that grow with a size, a small part of which is run and timed.

The duration of an attack with doublings or searches depends on its results, so the estimate is a range in units of its
own work. The time of a unit is always measured on the machine where the attack is to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from splitfed.attacks.knowledge import Knowledge
from splitfed.core.messages import View

BATCHES = 8
"""Number of batches on which a piece of work is timed."""
MEASURED = 0.1
"""Seconds by which a doubled size must take longer for the difference to count as more than jitter of the clock."""


@dataclass(frozen=True)
class Work:
    """Work in proportion to its size: `run(size)` does `size` units of it on the share `share` of the rows.

    `least`, `most`: total size over all attempts. `attempts`: least and largest number of attempts, each of which has
    the same fixed cost. Work without a size (0) has the fixed cost alone. `timed`: first size at which it is timed; it
    is doubled until that takes `MEASURED` longer, or all of the work is done. `measured`: fixed cost and cost of a unit
    in each measurement, in seconds; copies by `replace` share it.
    """

    run: Callable[[int], object]
    least: float
    most: float
    attempts: tuple[int, int] = (1, 1)
    share: float = 1.0
    timed: int = 1
    measured: list[tuple[float, float]] = field(default_factory=list, compare=False, repr=False)

    def seconds(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Return the least and the largest duration in seconds by `clock`, from the faster and the slower measurement.

        There are two measurements.
        """

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
    """Alternative works: one of `options`, each a list of pieces, will be done."""

    options: Sequence[Sequence[Work | OneOf]]

    def seconds(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Return the least and the largest duration of the options, in seconds by `clock`."""
        sums = [
            [sum(ends) for ends in zip(*(one.seconds(clock) for one in pieces), strict=True)] for pieces in self.options
        ]
        return min(least for least, _ in sums), max(most for _, most in sums)


@runtime_checkable
class StatesWork(Protocol):
    """An attack that states its work before it begins."""

    def work(self, view: View, knowledge: Knowledge) -> Sequence[Work | OneOf]:
        """Return the pieces of work of the attack on this view and knowledge."""
        ...
