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
ERRORS = 2.0
"""Standard errors of a difference that are taken for chance."""
EACH = 5
"""Rows of which chance lets all speak for the same in one case of 32."""

Predict = Callable[[View, Knowledge, int, torch.Generator], Tensor]
"""From a view, what is known, a size of the work and random numbers to a row for every one in the view."""


class EnsembleMember(NamedTuple):
    """An attack among others: its `name`, and how it predicts with work of a size.

    `learns`: whether it learns from auxiliary rows, so that it is the better for those held out; `searches`: whether
    it works on every row by itself: it is tried on few of the rows held out, and the victims are not among them;
    `passes`: row passes that a unit of its size takes in a trial (0: it has no steps); `start`: those that it takes
    besides; `last`: what its last prediction takes, of a trial; `least`: its smallest size.
    """

    name: str
    predict: Predict
    learns: bool = False
    searches: bool = False
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

    Two that were tried on other numbers of rows are compared by the rows of both. `anew`: whether what has learnt from
    rows learns once more from all of them, for the victims. `searched`: how many of the rows held out a search is tried
    on (default: all).
    """

    def __init__(
        self,
        held_out: HeldOut,
        seed: int,
        progress: Callable[[int], None],
        anew: bool = True,
        searched: int | None = None,
    ) -> None:
        self.held_out, self._seed, self._progress, self._anew = held_out, seed, progress, anew
        self.searched = held_out.first(held_out.count if searched is None else searched)
        """What arrives of the rows that searches are tried on, and what is known without them."""
        self.tried: list[Attempt] = []
        self._left_out: dict[str, LeftOut] = {}
        """Members that were never tried, as each share of the work was too small for them."""
        self.found: dict[str, Tensor] = {}
        """What each member predicts of the first rows held out, (n, *shape)."""
        self._victims: dict[str, Tensor] = {}
        self._combined: Tensor | None = None
        self._members: dict[str, tuple[EnsembleMember, int]] = {}
        self._weights: dict[str, float] = {}

    @property
    def chosen(self) -> str:
        """The member with the least error on the rows held out; of several the first.

        One without steps is it only where it is better than what learnt by more than `ERRORS` standard errors of that:
        what learns begins at a closed form's rows, and a few rows that are unlike all others may decide between the
        two. So is a search, which may end far off where a row is unlike those held out, the combination of all, and the
        smaller of two sizes of a member's work.
        """
        kinds: dict[tuple[bool, bool, int], list[str]] = {}
        for name, own in self.found.items():
            member, _ = self._members[name]
            closed = member.passes == 0
            kinds.setdefault((closed or member.searches, closed, len(own)), []).append(name)
        (doubtful, *_), *others = sorted(kinds)
        best = self._best(kinds[min(kinds)])
        for kind in others:
            name = self._best(kinds[kind])
            if self._exceeds(self.found[best], self.found[name], errors=kind[0] and not doubtful):
                best, doubtful = name, kind[0]
        combined = self._combined
        return COMBINATION if combined is not None and self._exceeds(self.found[best], combined, errors=True) else best

    def _takes(self, name: str, own: Tensor) -> bool:
        """Whether a member takes what it predicts of the rows held out with more work than before."""
        if not bool(own.isfinite().all()) or name not in self.found:
            return bool(own.isfinite().all())
        return not self._exceeds(own, self.found[name], errors=True)

    def _exceeds(self, one: Tensor, other: Tensor, errors: bool) -> bool:
        """Whether the error of `one` is the greater on the rows of both; `errors`: by more than chance.

        By `ERRORS` standard errors, or on each of `EACH` rows or more: one row may make a standard error large.
        """
        rows, count = min(len(one), len(other)), self.held_out.count
        of_one, of_other = (self.held_out.losses(own[:rows]) for own in (one, other))
        # A row that was asked for several times is one row.
        gain = torch.stack([part.mean() for part in (of_one - of_other).view(-1, min(count, rows)).unbind(1)])
        if errors and len(gain) >= EACH and bool((gain > 0).all()):
            return True
        return float(gain.mean()) > (ERRORS * float(gain.std()) / len(gain) ** 0.5 if errors and len(gain) > 1 else 0.0)

    @property
    def selection(self) -> Selection:
        """How the choice was made."""
        criterion = f"on held-out rows, in {len(folds)} folds" if (folds := self.held_out.folds) else "on held-out rows"
        left_out = tuple(self._left_out.values())
        return Selection(self.chosen, tuple(self.tried), left_out=left_out, criterion=criterion)

    def loss(self, name: str, rows: int) -> float:
        """Return what a member misses of the first `rows` held out, as they are scored; infinity if it found none."""
        return float(self.held_out.losses(self.found[name][:rows]).mean()) if name in self.found else math.inf

    def _best(self, names: Sequence[str]) -> str:
        rows = min(len(self.found[name]) for name in names)
        return min(names, key=lambda name: self.loss(name, rows))

    def run(self, member: EnsembleMember, size: int = 0) -> float:
        """Try a member with work of `size`; return its error on the rows held out that it was tried on."""
        started = time.perf_counter()
        predict, held_out = partial(self._predict, member, size), self.held_out
        victims: Tensor | None = None
        if member.searches:
            own = predict(*self.searched)
        else:
            both = held_out.cross_predict(predict) if member.learns else predict(held_out.view, held_out.knowledge)
            victims, own = held_out.split(both)
        error = held_out.error(own)
        if self._takes(member.name, own):
            self.found[member.name], self._members[member.name] = own, (member, size)
            if victims is not None and not (member.learns and self._anew):
                self._victims[member.name] = victims
        self._keep(member.name, size, error, time.perf_counter() - started)
        return error

    def race(self, members: Sequence[EnsembleMember], budget: float, looked: bool = False) -> None:
        """Try `members` with `budget` row passes altogether, fewer and fewer of them with more and more.

        `looked`: a look at them was the first rung, which is left to those for whom its share was too small.
        """
        left, spent = list(members), 0.0
        planned = rungs(len(left), budget, max(member.last for member in members))
        for rung, (count, least) in enumerate(planned):
            last = rung == len(planned) - 1 and bool(left)
            work = (budget - spent) / (1 + left[0].last) if last else least
            skipped = looked and not rung
            spent += self.look([m for m in left[:count] if not skipped or m.name in self._left_out], work)
            left = self._rank(left[:count])

    def look(self, members: Sequence[EnsembleMember], work: float) -> float:
        """Try each of `members` once, with `work` row passes; return how many that took altogether."""
        sizes = [(member, member.size(work)) for member in members]
        for member, size in sizes:
            if size:
                self.run(member, size)
                self._left_out.pop(member.name, None)
            elif member.name not in self.found:
                needed = f"{member.work(member.least):.0f} row passes at least, and its share is {work:.0f}"
                self._left_out[member.name] = LeftOut(member.name, needed)
        return sum(member.work(size) for member, size in sizes if size)

    def _rank(self, members: Sequence[EnsembleMember]) -> list[EnsembleMember]:
        """Return those of `members` that were tried, the best first."""
        able = [member for member in members if member.name not in self._left_out]
        rows = min((len(self.found[member.name]) for member in able if member.name in self.found), default=1)
        return sorted(able, key=lambda member: self.loss(member.name, rows))

    def leads(self, some: Sequence[EnsembleMember], others: Sequence[EnsembleMember], times: float) -> bool:
        """Whether the least mean squared error of `some` is more than so many `times` below that of `others`."""
        found = [[self.found[member.name] for member in part if member.name in self.found] for part in (some, others)]
        rows = min((len(own) for part in found for own in part), default=0)
        best, other = (min((self.held_out.error(own[:rows]) for own in part), default=math.inf) for part in found)
        return best * times < other

    def combine(self) -> None:
        """Try the convex combination of all that was found, judged on rows that its weights were not fitted to."""
        started = time.perf_counter()
        rows = min(map(len, self.found.values()))
        truth, own = self.held_out.x[:rows].cpu(), [own[:rows] for own in self.found.values()]
        weights, self._combined = combine(truth, own, self.held_out.count)
        error = self.held_out.error(self._combined)
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
        # What is below what a score tells is no gain.
        self.tried.append(Attempt(name, size, seconds, max(error, self.held_out.exact)))
        self._progress(len(self.tried))


def attempts_of(members: int) -> int:
    """Return how many attempts a race of so many members makes."""
    return sum(count for count, _ in rungs(members, 1.0)) if members else 0
