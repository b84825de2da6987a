"""The runs of a grid that are left: a queue that several processes share, which is nothing but the runs' folders.

A run is over where its folder has a result; who is at it is said by a lock that ends with its process
(`splitfed.study.run.ownership`). So the run of a worker that died is taken by the next one that looks, and that of a
worker that was suspended is left to it, however long that lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from splitfed.study.run.ownership import MOST_DEATHS, Claim, Locks, LostRun
from splitfed.study.run.store import StudyFolder


class HeldRun(NamedTuple):
    """A run that this process does: its name, and the lock by which it holds it."""

    name: str
    claim: Claim


class RunQueue:
    """The runs called `names` of the study in `home`, taken and held by `locks`."""

    def __init__(self, home: StudyFolder, names: Sequence[str], locks: Locks) -> None:
        self._home, self._names, self.locks = home, list(names), locks

    def take(self) -> HeldRun | None:
        """Return a run to do; None where all are done, held or left out."""
        with self.locks.turn():
            for name in self._free():
                if (claim := self.locks.claim(name)) is not None:
                    return HeldRun(name, claim)
        return None

    def has_work(self) -> bool:
        """Return whether there is a run for another worker to take."""
        with self.locks.turn():
            return any(not self.locks.is_held(name) for name in self._free())

    def left_out(self) -> list[str]:
        """Return the runs that are not done since as many workers as may have died at them."""
        return [name for name in self._names if self._is_left(name) and self.locks.deaths(name) >= MOST_DEATHS]

    def _free(self) -> Iterator[str]:
        """Yield the runs that are not over, but for those at which too many workers have died."""
        for name in self._names:
            if self._is_left(name) and self.locks.deaths(name) < MOST_DEATHS:
                yield name

    def _is_left(self, name: str) -> bool:
        return not (self._home.run(name) / "result.json").is_file()


def work_queue(queue: RunQueue, do: Callable[[HeldRun], None], lost: Callable[[str, LostRun], None]) -> None:
    """Take runs from the queue until there is none to take, and `do` each.

    `lost(name, why)` is told of a run that another process has taken over meanwhile.
    """
    while (held := queue.take()) is not None:
        try:
            do(held)
        except LostRun as error:
            lost(held.name, error)
        finally:
            held.claim.release()
