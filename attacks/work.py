"""The work of an attack before it begins: pieces that grow with a size, a little of which can be done and timed.

How long an attack with doublings takes is not known beforehand, for its results decide when it stops: least and most
are, in units of its own work. What a unit takes is measured where the attack is to run, never taken from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from splitfed.attacks.knowledge import Knowledge
from splitfed.core.messages import View

BATCHES = 8
"""Batches of rows that a piece of work is timed on."""


@dataclass(frozen=True)
class Work:
    """Work that grows in proportion to its size: `run(size)` does as much of it, on the share `share` of the rows.

    `least`, `most`: its sizes altogether, over all attempts. `attempts`: how often it is begun, at least and at most;
    what beginning takes is paid every time. Work without a size (0) takes what beginning takes. `timed`: the size at
    which it is timed, and at twice as much.
    """

    run: Callable[[int], object]
    least: float
    most: float
    attempts: tuple[int, int] = (1, 1)
    share: float = 1.0
    timed: int = 1

    def seconds(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Return what it takes at least and at most by `clock`, from the faster of two runs at either size."""

        def took(size: int) -> float:
            started = clock()
            self.run(size)
            return clock() - started

        if self.most == 0:
            start = min(took(0) for _ in range(2))
            return start * self.attempts[0], start * self.attempts[1]
        pairs = [(took(self.timed), took(2 * self.timed)) for _ in range(2)]
        once, twice = (min(pair[i] for pair in pairs) for i in range(2))
        # Where a busy machine cannot tell the two apart all of it counts as growing.
        unit = (twice - once) / self.timed if twice > once else twice / (2 * self.timed)
        start = max(once - unit * self.timed, 0.0) if twice > once else 0.0
        least, most = (
            (unit * size + start * begun) / self.share
            for size, begun in zip((self.least, self.most), self.attempts, strict=True)
        )
        return least, most


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
