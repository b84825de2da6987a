"""A race of attacks by successive halving: all are tried with little work, and the best third with three times as much.

Paper: Jamieson, Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016,
algorithm 1 (successive halving), where a third instead of a half goes on to the next rung.

Work is counted in row passes: one row once forward and backward through the trained network, or through the segment
that is inverted. Seconds are recorded but decide nothing. Errors are those on held-out rows of the adversary's own. A
trial with more work starts anew, so that its size is all the work of the prediction.

The last candidate is a convex combination of the predictions, with weights from non-negative least squares on held-out
rows: stacking, Breiman, "Stacked regressions", Machine Learning 24, 1996, whose weights are not negative either; that
they sum to one is ours, so that predictions stay in the range of the data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge
from splitfed.attacks.reconstruction.held_out import HeldOut
from splitfed.attacks.selection import Attempt, LeftOut, Selection
from splitfed.core.messages import View
from splitfed.core.random import derive

GROWTH = 3
"""Factor of the work from one rung to the next; one member in this many goes on to the next rung."""
COMBINATION = "combination"
LEAST_WEIGHT = 0.01
"""Members with a smaller weight are left out of the combination."""
ERRORS = 2.0
"""Number of standard errors up to which a difference of errors counts as chance."""
EACH = 5
"""Smallest number of rows that decide if all of them favour the same member; by chance 1 case in 32 of 5 rows."""

Predict = Callable[[View, Knowledge, int, torch.Generator], Tensor]
"""Maps view, knowledge, size of the work and random generator to a prediction, one row for each row in the view."""


class EnsembleMember(NamedTuple):
    """A candidate attack: its `name`, and `predict`, its prediction with work of a given size.

    `learns`: whether it learns from auxiliary rows, so that it must be tested on others; `searches`: whether it works
    on each row separately, so that it is tried on a few held-out rows without the victims; `passes`: row passes of one
    unit of its size in a trial (0: it has no steps); `start`: fixed number of row passes; `last`: work of the final
    prediction, relative to a trial; `least`: smallest size.
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
        """Return the number of row passes of a trial of `size`."""
        return self.start + self.passes * size

    def size(self, work: float) -> int:
        """Return the size of a trial of about `work` row passes; 0 if its smallest size takes more."""
        size = int((work - self.start) / self.passes)
        return size if size >= self.least else 0


def rungs(members: int, budget: float, last: float = 0.0) -> list[tuple[int, float]]:
    """Return for each rung the number of members that are tried, and the minimum number of row passes of each.

    All trials, and the final prediction of the last member (`last` times the work of its last trial), take `budget`
    together. The last member gets the remaining work, which is more if its own prediction takes less.
    """
    # At least two rungs, as one size does not show what more work would gain.
    counts = [members]
    while counts[-1] > 1 or len(counts) < 2:
        counts.append(math.ceil(counts[-1] / GROWTH))
    shares = [GROWTH**rung for rung in range(len(counts))]
    unit = budget / (sum(count * share for count, share in zip(counts, shares, strict=True)) + last * shares[-1])
    return [(count, unit * share) for count, share in zip(counts, shares, strict=True)]


class Trials:
    """Trials of members on held-out rows: the predictions of each at its best size (`found`), and all attempts.

    Members that were tried on different numbers of rows are compared on the common ones. `anew`: whether members that
    learn from auxiliary rows are trained again on all of them for the final prediction. `searched`: number of held-out
    rows on which a search is tried (default: all).
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
        """View of the rows on which searches are tried, and the knowledge without these rows."""
        self.tried: list[Attempt] = []
        self._left_out: dict[str, LeftOut] = {}
        """Members that were never tried, as their share of the work was always too small."""
        self.found: dict[str, Tensor] = {}
        """Member -> its prediction of the first held-out rows, (n, *shape)."""
        self._victims: dict[str, Tensor] = {}
        self._combined: Tensor | None = None
        self._members: dict[str, tuple[EnsembleMember, int]] = {}
        self._weights: dict[str, float] = {}

    @property
    def chosen(self) -> str:
        """Name of the member with the least error on held-out rows; the first among equals.

        A member without steps is chosen over one that learns only if its error is smaller by more than `ERRORS`
        standard errors of the difference: learning members start from a closed form, and a few outlying rows may decide
        between the two. The same holds for a search, which may fail on rows unlike the held-out ones, for the
        combination, and for the smaller of two sizes of one member.
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
        """Return whether the prediction `own` of member `name`, with more work, replaces its previous one."""
        if not bool(own.isfinite().all()) or name not in self.found:
            return bool(own.isfinite().all())
        return not self._exceeds(own, self.found[name], errors=True)

    def _exceeds(self, one: Tensor, other: Tensor, errors: bool) -> bool:
        """Return whether the error of `one` exceeds that of `other` on common rows; `errors`: by more than chance.

        More than chance: by `ERRORS` standard errors, or on every row if there are `EACH` or more, as a single row may
        make the standard error large.
        """
        rows, count = min(len(one), len(other)), self.held_out.count
        of_one, of_other = (self.held_out.losses(own[:rows]) for own in (one, other))
        # A row that was queried several times counts once.
        gain = torch.stack([part.mean() for part in (of_one - of_other).view(-1, min(count, rows)).unbind(1)])
        if errors and len(gain) >= EACH and bool((gain > 0).all()):
            return True
        return float(gain.mean()) > (ERRORS * float(gain.std()) / len(gain) ** 0.5 if errors and len(gain) > 1 else 0.0)

    @property
    def selection(self) -> Selection:
        """Record of the selection."""
        criterion = f"on held-out rows, in {len(folds)} folds" if (folds := self.held_out.folds) else "on held-out rows"
        left_out = tuple(self._left_out.values())
        return Selection(self.chosen, tuple(self.tried), left_out=left_out, criterion=criterion)

    def loss(self, name: str, rows: int) -> float:
        """Return the mean loss of a member on the first `rows` held-out rows; infinity without a prediction of them."""
        return float(self.held_out.losses(self.found[name][:rows]).mean()) if name in self.found else math.inf

    def _best(self, names: Sequence[str]) -> str:
        rows = min(len(self.found[name]) for name in names)
        return min(names, key=lambda name: self.loss(name, rows))

    def run(self, member: EnsembleMember, size: int = 0) -> float:
        """Try a member with work of `size`; return its error on the held-out rows on which it was tried."""
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
        """Try `members` with `budget` row passes in total: on each rung fewer members with more work each.

        `looked`: whether `look` has been the first rung already; on it only members whose share was too small then are
        tried.
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
        """Try each of `members` once, with `work` row passes; return the total number of row passes."""
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
        """Return the `members` that were tried, the best first."""
        able = [member for member in members if member.name not in self._left_out]
        rows = min((len(self.found[member.name]) for member in able if member.name in self.found), default=1)
        return sorted(able, key=lambda member: self.loss(member.name, rows))

    def leads(self, some: Sequence[EnsembleMember], others: Sequence[EnsembleMember], times: float) -> bool:
        """Return whether the least mean squared error of `some`, multiplied by `times`, is below that of `others`."""
        found = [[self.found[member.name] for member in part if member.name in self.found] for part in (some, others)]
        rows = min((len(own) for part in found for own in part), default=0)
        best, other = (min((self.held_out.error(own[:rows]) for own in part), default=math.inf) for part in found)
        return best * times < other

    def combine(self) -> None:
        """Try the convex combination of all predictions, tested on rows to which its weights were not fitted."""
        started = time.perf_counter()
        rows = min(map(len, self.found.values()))
        truth, own = self.held_out.x[:rows].cpu(), [own[:rows] for own in self.found.values()]
        weights, self._combined = combine(truth, own, self.held_out.count)
        error = self.held_out.error(self._combined)
        self._weights = {name: w for name, w in zip(self.found, weights, strict=True) if w > LEAST_WEIGHT}
        self._keep(COMBINATION, 0, error, time.perf_counter() - started)

    def predict(self, name: str, view: View, knowledge: Knowledge) -> Tensor:
        """Return the prediction of the victims in `view` by the member `name`, with all `knowledge`."""
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
        # Every attempt has its own random numbers, so that a further attempt changes no other one.
        return torch.Generator().manual_seed(derive(self._seed, "member", member.name, size))

    def _predict(self, member: EnsembleMember, size: int, view: View, knowledge: Knowledge) -> Tensor:
        predictions = member.predict(view, knowledge, size, self._draws(member, size))
        return predictions if knowledge.value_range is None else predictions.clamp(*knowledge.value_range)

    def _keep(self, name: str, size: int, error: float, seconds: float) -> None:
        # An error below the resolution of the score is no gain.
        self.tried.append(Attempt(name, size, seconds, max(error, self.held_out.exact)))
        self._progress(len(self.tried))


def attempts_of(members: int) -> int:
    """Return the number of attempts in a race of so many `members`."""
    return sum(count for count, _ in rungs(members, 1.0)) if members else 0


def combine(truth: Tensor, own: Sequence[Tensor], count: int) -> tuple[list[float], Tensor]:
    """Return the weights of the predictions `own` of held-out rows, and their cross-fitted combination.

    `truth`: (n, *shape); `own`: predictions of the same shape. The combination of each half of the rows uses weights
    fitted to the other half; NaN for a single row. Rows repeat after every `count` rows.
    """
    halves = torch.arange(len(truth)) % count % 2 == 0
    weights = convex_weights(own, truth)
    crossed = torch.full_like(truth, torch.nan)
    for fitted in (halves, ~halves):
        if bool(fitted.any()):
            found = convex_weights([p[fitted] for p in own], truth[fitted])
            crossed[~fitted] = weigh(found, [p[~fitted] for p in own])
    return weights, crossed


def weigh(weights: Sequence[float], predictions: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of `predictions`."""
    return torch.stack([w * p for w, p in zip(weights, predictions, strict=True)]).sum(0)


def convex_weights(predictions: Sequence[Tensor], truth: Tensor) -> list[float]:
    """Return weights >= 0 of sum 1 that minimise the squared error of the weighted `predictions` of `truth`.

    truth and predictions: (rows, *shape).
    """
    # scipy's optimizers take a third of a second to import.
    from scipy.optimize import nnls

    columns = torch.stack([(p - truth).flatten() for p in predictions], 1).double()
    # With weights of sum 1 the error is |columns w|²; its factor is small, however many rows there are.
    factor: Any = np.linalg.qr(columns.numpy(), mode="r")
    factor = factor / max(float(np.abs(factor).max()), 1e-300)
    # min |R w|² for w >= 0 and sum w = 1 is, but for its length, min |R w|² + (sum w - 1)².
    found, _ = nnls(np.vstack([factor, np.ones(len(predictions))]), np.r_[np.zeros(len(factor)), 1.0])
    return [float(w) for w in found / found.sum()]
