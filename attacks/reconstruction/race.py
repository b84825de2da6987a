"""A race of attacks: all are tried with a little work, the best third of them with three times as much, to the last.

Paper: Jamieson, Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016,
algorithm 1 (successive halving), with a third that stays in place of a half.

Work is counted in row passes: one row once forward and backward through the network that is learnt, or through the
segment that is searched. Seconds are told and decide nothing. Errors are those on rows that the adversary held out of
its own. What is tried with more work begins anew, so that a size says what the whole of a prediction took.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge
from splitfed.attacks.reconstruction.combination import combine, weigh
from splitfed.attacks.reconstruction.held_out import HeldOut
from splitfed.attacks.selection import Attempt, LeftOut, Selection
from splitfed.core.messages import View
from splitfed.core.random import derive

GROWTH = 3
"""How many times as much work as before has what stays in the race, and one of how many stays."""
COMBINATION = "combination"
LEAST_WEIGHT = 0.01
"""A member that counts for less in a combination is left out of it."""

Predict = Callable[[View, Knowledge, int, torch.Generator], Tensor]
"""From a view, what is known, a size of the work and random numbers to a row for every one in the view."""


class EnsembleMember(NamedTuple):
    """An attack among others: its `name`, and how it predicts with work of a size.

    `learns`: whether it learns from auxiliary rows, so that it is the better for those held out; `searches`: whether
    it works on every row by itself, so that victims need not be among those it is tried on; `begins_at`: the member at
    whose rows a search begins ("": none). `passes`: row passes that a unit of its size takes in a trial (0: it has no
    steps); `start`: those that it takes besides; `last`: what its last prediction takes, of a trial; `least`: its
    smallest size.
    """

    name: str
    predict: Predict
    learns: bool = False
    searches: bool = False
    begins_at: str = ""
    passes: float = 0.0
    start: float = 0.0
    last: float = 0.0
    least: int = 1

    def work(self, size: int) -> float:
        """Return the row passes that a trial of `size` takes."""
        return self.start + self.passes * size

    def size(self, work: float) -> int:
        """Return the size of which a trial takes about `work` row passes; 0 where its least size takes more."""
        size = int((work - self.start) / self.passes)
        return size if size >= self.least else 0


def rungs(members: int, budget: float, last: float = 0.0) -> list[tuple[int, float]]:
    """Return how many members are tried on each rung, and the row passes that each has there at least.

    All trials together, and the prediction of the last member that takes `last` times the work of its last trial, take
    `budget`. The last member has what is left of that, so more where its own prediction takes less.
    """
    # Two rungs at least, as a single size says nothing of what more work would gain.
    counts = [members]
    while counts[-1] > 1 or len(counts) < 2:
        counts.append(math.ceil(counts[-1] / GROWTH))
    shares = [GROWTH**rung for rung in range(len(counts))]
    unit = budget / (sum(count * share for count, share in zip(counts, shares, strict=True)) + last * shares[-1])
    return [(count, unit * share) for count, share in zip(counts, shares, strict=True)]


class Trials:
    """Members that were tried: the predictions of each at the size at which it is best, `found`, and all attempts.

    `anew`: whether what has learnt from rows learns once more from all of them, for the victims.
    """

    def __init__(self, held_out: HeldOut, seed: int, progress: Callable[[int], None], anew: bool = True) -> None:
        self.held_out, self._seed, self._progress, self._anew = held_out, seed, progress, anew
        self.tried: list[Attempt] = []
        self.left_out: list[LeftOut] = []
        self.found: dict[str, Tensor] = {}
        """What each member predicts of the rows held out, (count, *shape)."""
        self._victims: dict[str, Tensor] = {}
        self._errors: dict[str, float] = {}
        self._members: dict[str, tuple[EnsembleMember, int]] = {}
        self._weights: dict[str, float] = {}

    @property
    def chosen(self) -> str:
        """The member with the least error on the rows held out; of several the first."""
        return min(self._errors, key=lambda name: self._errors[name])

    @property
    def selection(self) -> Selection:
        """How the choice was made."""
        criterion = f"on held-out rows, in {len(folds)} folds" if (folds := self.held_out.folds) else "on held-out rows"
        return Selection(self.chosen, tuple(self.tried), left_out=tuple(self.left_out), criterion=criterion)

    def run(self, member: EnsembleMember, size: int = 0) -> float:
        """Try a member with work of `size`; return its error on the rows held out."""
        started = time.perf_counter()
        predict, held_out = partial(self._predict, member, size), self.held_out
        victims: Tensor | None = None
        if member.searches:
            own = held_out.cross_search(predict) if member.learns else predict(held_out.own, held_out.knowledge)
        else:
            both = held_out.cross_predict(predict) if member.learns else predict(held_out.view, held_out.knowledge)
            victims, own = held_out.split(both)
        error = held_out.error(own)
        if error < self._errors.get(member.name, math.inf):
            self.found[member.name], self._members[member.name] = own, (member, size)
            if victims is not None and not (member.learns and self._anew):
                self._victims[member.name] = victims
        self._keep(member.name, size, error, time.perf_counter() - started)
        return error

    def race(self, members: Sequence[EnsembleMember], budget: float) -> None:
        """Try `members` with `budget` row passes altogether, fewer and fewer of them with more and more."""
        left, spent = list(members), 0.0
        planned = rungs(len(left), budget, max(member.last for member in members))
        for rung, (count, least) in enumerate(planned):
            last = rung == len(planned) - 1 and bool(left)
            work = (budget - spent) / (1 + left[0].last) if last else least
            sizes = {member.name: member.size(work) for member in left[:count]}
            if not rung:
                self.left_out += [
                    LeftOut(
                        m.name, f"{m.start + m.least * m.passes:.0f} row passes at least, and its share is {work:.0f}"
                    )
                    for m in members
                    if not sizes[m.name]
                ]
            left = [member for member in left[:count] if sizes[member.name]]
            errors = {member.name: self.run(member, sizes[member.name]) for member in left}
            spent += sum(member.work(sizes[member.name]) for member in left)
            left.sort(key=lambda member: errors[member.name])

    def combine(self) -> None:
        """Try the convex combination of all that was found, judged on rows that its weights were not fitted to."""
        started = time.perf_counter()
        weights, error = combine(self.held_out.x.cpu(), list(self.found.values()))
        self._weights = {name: w for name, w in zip(self.found, weights, strict=True) if w > LEAST_WEIGHT}
        self._keep(COMBINATION, 0, error, time.perf_counter() - started)

    def predict(self, name: str, view: View, knowledge: Knowledge) -> Tensor:
        """Return what the member `name` predicts of the victims in `view`, from all that is known of them."""
        if name not in self._victims:
            self._victims[name] = self._predict_anew(name, view, knowledge)
        return self._victims[name]

    def _predict_anew(self, name: str, view: View, knowledge: Knowledge) -> Tensor:
        if name == COMBINATION:
            total = sum(self._weights.values())
            parts = [self.predict(n, view, knowledge) for n in self._weights]
            return weigh([w / total for w in self._weights.values()], parts)
        member, size = self._members[name]
        return self._predict(member, size, view, knowledge)

    def _draws(self, member: EnsembleMember, size: int) -> torch.Generator:
        # Every attempt draws its own random numbers, so that one more of them changes none of the others.
        return torch.Generator().manual_seed(derive(self._seed, "member", member.name, size))

    def _predict(self, member: EnsembleMember, size: int, view: View, knowledge: Knowledge) -> Tensor:
        predictions = member.predict(view, knowledge, size, self._draws(member, size))
        return predictions if knowledge.value_range is None else predictions.clamp(*knowledge.value_range)

    def _keep(self, name: str, size: int, error: float, seconds: float) -> None:
        self.tried.append(Attempt(name, size, seconds, error))
        self._errors[name] = min(error, self._errors.get(name, math.inf))
        self._progress(len(self.tried))


def attempts_of(members: int) -> int:
    """Return how many attempts a race of so many members makes."""
    return sum(count for count, _ in rungs(members, 1.0)) if members else 0
