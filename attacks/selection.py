"""Selection among several attacks: what was tried, which one was chosen, and whether more work would gain."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

CONVERGED = {"mse": 0.2, "auc": 0.01, "accuracy": 0.01}
"""Metric on the held-out rows -> the gain of a doubling of work below which a member has converged.

In dB for a mean squared error, in units of the metric (0 to 1) for an AUC or an accuracy.
"""


@dataclass(frozen=True)
class Attempt:
    """One `member` at one `size` of its work (epochs or iterations; 0: closed form), and the `seconds` it took.

    `error`: on rows whose truth the adversary knows: mean squared error, 1 - AUC or 1 - accuracy; NaN without such
    rows.
    """

    member: str
    size: int
    seconds: float
    error: float


@dataclass(frozen=True)
class LeftOut:
    """A `member` that did not take part, and the `reason` as one line."""

    member: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """Which `member` made the prediction, and every attempt in the order in which they were made.

    `metric`: of the attempts' errors, "mse", "auc" or "accuracy". `left_out`: members that did not take part.
    `criterion`: the rows or the rule by which the choice was made.
    """

    member: str
    tried: tuple[Attempt, ...]
    metric: str = "mse"
    left_out: tuple[LeftOut, ...] = ()
    criterion: str = "on held-out rows"

    @property
    def gain(self) -> float | None:
        """Gain of doubling the chosen member's work, by its last two sizes, in the unit of `CONVERGED`.

        If the chosen member was tried with one size only, as a combination is, the largest gain of any member; None if
        every member was tried with one size only.
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
        """Whether the last doubling gained less than `CONVERGED`; None if `gain` is None."""
        return None if (gain := self.gain) is None else gain < CONVERGED[self.metric]

    def curve(self) -> list[tuple[float, float]]:
        """Return (cumulative seconds, least error so far) after every attempt."""
        seconds, least, points = 0.0, math.inf, []
        for attempt in self.tried:
            seconds, least = seconds + attempt.seconds, min(least, attempt.error)
            points.append((seconds, least))
        return points

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, with `gain` and `converged`."""
        return {**asdict(self), "gain": self.gain, "converged": self.converged}


def gain_of(metric: str, before: float, after: float) -> float:
    """Return the gain of an error of `metric` that fell from `before` to `after`: dB for "mse", else the difference."""
    return decibels(before, after) if metric == "mse" else before - after


def decibels(before: float, after: float) -> float:
    """Return the reduction of a mean squared error in dB, positive if it fell; infinity if `after` is 0."""
    if before == after:
        return 0.0
    return math.inf if after == 0 else 10 * math.log10(before / after)
