"""What attacks that choose among several tell of their choice: what was tried, and whether more work would gain."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

CONVERGED = {"mse": 0.2, "auc": 0.01, "accuracy": 0.01}
"""Metric of the rows held out -> how little the last doubling of a member's work gains where it has converged.

In dB of a mean squared error, in points of an area under the curve or of an accuracy.
"""


@dataclass(frozen=True)
class Attempt:
    """One `member` at one `size` of its work (epochs or iterations; 0: closed form), and the `seconds` it took.

    `error`: on rows of which the adversary knows the truth: the mean squared error, 1 - AUC or 1 - accuracy; NaN where
    there were no such rows.
    """

    member: str
    size: int
    seconds: float
    error: float


@dataclass(frozen=True)
class LeftOut:
    """A `member` that took no part, and the `reason` in a line."""

    member: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """Which `member` made the prediction, and every attempt in the order in which they were made.

    `metric`: of what an attempt's error is one, "mse", "auc" or "accuracy". `left_out`: members that took no part.
    `criterion`: on or by what the choice was made.
    """

    member: str
    tried: tuple[Attempt, ...]
    metric: str = "mse"
    left_out: tuple[LeftOut, ...] = ()
    criterion: str = "on held-out rows"

    @property
    def gain(self) -> float | None:
        """What twice the work gained, by the last two sizes of who made the prediction, in the unit of `CONVERGED`.

        Where that has no two sizes, as a combination has none, the most that it gained of any member; None where
        nothing was tried with more than one size.
        """
        gains = {
            member: gain
            for member in dict.fromkeys(a.member for a in self.tried)
            if (gain := self._gain(member)) is not None
        }
        return gains.get(self.member, max(gains.values(), default=None))

    def _gain(self, member: str) -> float | None:
        errors = {a.size: a.error for a in self.tried if a.member == member and a.size}
        if len(errors) < 2:
            return None
        before, after = sorted(errors)[-2:]
        return gain_of(self.metric, errors[before], errors[after]) / math.log2(after / before)

    @property
    def converged(self) -> bool | None:
        """Whether twice the work gained less than `CONVERGED` says; None where `gain` is."""
        return None if (gain := self.gain) is None else gain < CONVERGED[self.metric]

    def curve(self) -> list[tuple[float, float]]:
        """Return the least error so far after every attempt: (seconds altogether, error)."""
        seconds, least, points = 0.0, math.inf, []
        for attempt in self.tried:
            seconds, least = seconds + attempt.seconds, min(least, attempt.error)
            points.append((seconds, least))
        return points

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data, with the gain and whether it has converged."""
        return {**asdict(self), "gain": self.gain, "converged": self.converged}


def gain_of(metric: str, before: float, after: float) -> float:
    """Return what an error of `metric` that fell from `before` to `after` gained: dB of "mse", else points."""
    return decibels(before, after) if metric == "mse" else before - after


def decibels(before: float, after: float) -> float:
    """Return by how many dB a mean squared error fell, >= 0 where it did; infinity where nothing is left of it."""
    if before == after:
        return 0.0
    return math.inf if after == 0 else 10 * math.log10(before / after)
