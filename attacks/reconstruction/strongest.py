"""Strongest: the reconstruction attacks of this house, with more and more work, chosen on the adversary's own rows.

Paper: none; after He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019, whose two
attacks are among its members, and Breiman, "Stacked regressions", Machine Learning 1996, for the combination of all.

Its members are `linear_inverse`, `nearest`, `inverse_network` of several widths and, where the upstream
weights are granted, `rmle`, in longer budgets `latent_search`, and a search that begins at the best decoder's rows
(`refinement`); where an attack was in the training, what that predicts; and last a convex combination of all of them,
its weights by least squares.

The choice is the adversary's: some of its rows are held out, their releases stand behind the victims' without a mark,
and the member with the least squared error on them makes the prediction, once it has learnt from all of the rows. The
truth of the victims has no part in it. Where fewer than `ENOUGH` would be held out, a few rows of a heavy tail would
decide: all rows are then held out in turn, in folds, and what learns from them is trained anew in each. The mean over
all rows judges, as the mean over victims is what the attack is judged by: medians and trimmed means estimate something
else, and chose worse on heavy-tailed tables.

A member that takes steps is tried with twice as many until that gains less than .2 dB or `doublings` is reached; which
of the two it was is said (`Selection.converged`): a figure that has not converged is a lower bound of what leaks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import (
    FORWARD,
    Attack,
    Budgets,
    Knowledge,
    Needs,
    PredictionAndSelection,
    Progress,
    Target,
    TrainedAttack,
    unwrap,
)
from splitfed.attacks.reconstruction.combination import combine, weigh
from splitfed.attacks.reconstruction.held_out import HeldOut, count_folds, hold_out, hold_out_in_folds
from splitfed.attacks.reconstruction.refinement import Refinement, measure_noise
from splitfed.attacks.selection import Attempt, Selection, double_work, name_budgets
from splitfed.attacks.work import BATCHES, Work, sum_doublings
from splitfed.core.errors import require_count, require_counts, require_number, require_share
from splitfed.core.messages import View
from splitfed.core.random import derive
from splitfed.registry import load

QUICK = {"widths": (16,), "epochs": 4, "iterations": 40, "doublings": 1, "prior": False}
STANDARD = {"widths": (16, 32), "epochs": 10, "iterations": 300, "doublings": 3, "prior": True}
FULL = {"widths": (16, 32, 64), "epochs": 20, "iterations": 600, "doublings": 5, "prior": True}

SMOOTHING = (0.0, 1e-3, 1e-2, 1e-1)
"""Weights of the total variation among which the search from nothing chooses."""
REACH = (0.3, 3.0, 30.0)
"""How far a refinement may go from the first prediction, among which it chooses."""
RATE = 0.01
"""Adam's rate for a refinement, in the unit of the data's standard deviation."""
ENOUGH = 30
"""Rows held out from which on a single hold-out chooses; with fewer all are held out in turn, in folds.

Folds multiply the work of all that learns by their number, up to ten, and gain the less the more rows are held out.
"""
COMBINATION = "combination"
LEAST_WEIGHT = 0.01
"""A member that counts for less in a combination is left out of it."""
LEAST_RESIDUAL = 1e-12
"""Mean squared error of a first prediction that is taken for exact."""


Predict = Callable[[View, Knowledge, int, torch.Generator], Tensor]
"""From a view, what is known, a size of the work and random numbers to a row for every one in the view."""


class EnsembleMember(NamedTuple):
    """An attack among others: its `name`, the `size` of its work at first (0: it has no steps), and how it predicts.

    `learns`: whether it learns from auxiliary rows, so that it is the better for those held out; `begins_at`: the
    member at whose rows it begins ("": none), which may have learnt from them.
    """

    name: str
    size: int
    predict: Predict
    learns: bool = False
    begins_at: str = ""


@dataclass(frozen=True)
class Strongest(Attack):
    """Decoders of `widths` from `epochs` on, searches from `iterations` on, each doubled at most `doublings` times.

    `white_box`: whether members that know the upstream weights take part, where these are granted; `prior`: whether
    `latent_search`, with its own default number of restarts, is one of them. The share `validation` of the auxiliary
    rows chooses; where that is fewer than `ENOUGH` rows all of them do, in 1 / `validation` folds (2 to 10), and what
    learns from them is trained once a fold. `batch_size`, `lr` and `queries` are those of `inverse_network`. Budgets
    are called "quick", "standard" and "full"; "fast", "default" and "paper" are the same.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    adapts_to = FORWARD
    trains_decoder: ClassVar[bool] = True
    budgets: ClassVar[Budgets] = name_budgets(QUICK, STANDARD, FULL)

    widths: tuple[int, ...] = field(default=(16, 32), metadata=require_counts("strongest widths", low=1))
    epochs: int = field(default=10, metadata=require_count("strongest epochs", low=1))
    iterations: int = field(default=300, metadata=require_count("strongest iterations", low=1))
    white_box: bool = True
    prior: bool = True
    doublings: int = field(default=3, metadata=require_count("strongest doublings", low=1))
    batch_size: int = field(default=32, metadata=require_count("strongest batch_size", low=1))
    lr: float = field(default=3e-3, metadata=require_number("strongest lr", low=0.0, open_low=True))
    queries: int = field(default=5, metadata=require_count("strongest queries", low=1))
    validation: float = field(default=0.2, metadata=require_share("strongest validation"))

    @property
    def uses(self) -> frozenset[Needs]:
        """What some members need, beyond what all of them require."""
        return frozenset({Needs.TRAINING_ATTACK, *([Needs.UPSTREAM] if self.white_box else [])})

    def run(
        self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress
    ) -> PredictionAndSelection:
        """Return the chosen member's rows for the releases in the view, (victims, *shape), and how it was chosen."""
        trials = self.compare(view, knowledge, generator, progress)
        prediction = trials.predict(trials.chosen, view, knowledge)
        return PredictionAndSelection(prediction, trials.selection)

    def compare(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Trials:
        """Return every member, tried on rows held out."""
        held_out = self._hold_out(view, knowledge, generator)
        white_box, state = knowledge.upstream is not None, knowledge.training_attack
        most = 4 + len(self.widths) * (1 + self.doublings) + white_box * (len(SMOOTHING + REACH) + 2 * self.doublings)
        most += white_box * self.prior * (1 + self.doublings)
        trials = Trials(held_out, generator.initial_seed(), lambda done: progress(min(done, most - 1), most))
        for member in self._closed_forms(held_out):
            trials.run(member, 0)
        if state is not None and getattr(state.plan, "target", None) is Target.INPUTS:
            trials.run(_training_attack_member(state), 0)
        for member in self._decoders():
            trials.run(member, self.doublings)
        if white_box:
            trials.run_best(self._searches(), self.doublings)
            if self.prior:
                latent = load("attacks", "latent_search")()
                trials.run(attack_member("latent_search", latent, "iterations", self.iterations), self.doublings)
            trials.run_best(self._refinements(trials), self.doublings)
        trials.combine()
        progress(most, most)
        return trials

    def work(self, view: View, knowledge: Knowledge) -> list[Work]:
        """Return its work: closed forms, decoders of every width, and searches where it knows the upstream weights.

        The searches from a first prediction are taken for as long as those from nothing.
        """
        rows, victims = unwrap(knowledge.auxiliary), len(next(iter(_released(view, knowledge.device).values())))
        folds = self._folds(len(rows))
        aside = len(rows) if folds > 1 else round(self.validation * len(rows))
        kept = max(len(rows) - math.ceil(aside / folds), 1)
        few = replace(knowledge, auxiliary=rows[: min(kept, BATCHES * self.batch_size)])
        share = len(unwrap(few.auxiliary)) / kept

        def runs(attack: Attack, known: Knowledge, parameter: str = "") -> Callable[[int], object]:
            member = attack_member("", attack, parameter)
            return lambda size: member.predict(view, known, size, torch.Generator().manual_seed(0))

        # Its last prediction is made by the chosen member, which may be the combination of all of them, from all rows.
        closed = [load("attacks", name)() for name in ("linear_inverse", "nearest")]
        found = [Work(runs(attack, knowledge), 0, 0, (folds, folds + 1)) for attack in closed]
        longest, (least, most) = 2**self.doublings, sum_doublings(1, self.doublings)
        begun = (2 * folds, (self.doublings + 1) * folds + 1)
        for member in self._decoders_by_width():
            sizes = (self.epochs * least * folds, self.epochs * (most * folds + longest * len(rows) / kept))
            found.append(Work(runs(member, few, "epochs"), *sizes, begun, share))
        if knowledge.upstream is not None:
            # Of those tried once the best alone is doubled; a refinement is made for the victims once more.
            once = len(SMOOTHING) + len(REACH)
            sizes = (self.iterations * (once + 2 * (least - 1)), self.iterations * (once + 2 * (most - 1) + longest))
            attempts = (once + 2, once + 2 * self.doublings + 1)
            search = runs(load("attacks", "rmle")(), knowledge, "iterations")
            found.append(Work(search, *sizes, attempts, victims / (victims + aside), timed=5))
            if self.prior:
                seen = victims / (victims + math.ceil(aside / folds))
                sizes = (self.iterations * least * folds, self.iterations * (most * folds + longest))
                found += _latent_search_work(view, few, sizes, begun, share, seen)
        return found

    def _hold_out(self, view: View, knowledge: Knowledge, generator: torch.Generator) -> HeldOut:
        """Return the rows that choose: a share held out once where that is enough of them, else all of them in turn."""
        if self._folds(len(unwrap(knowledge.auxiliary))) > 1:
            return hold_out_in_folds("strongest", view, knowledge, self.validation, generator)
        # The first draw is of no use; without it every choice that was made so far would be another.
        hold_out("strongest", view, knowledge, self.validation, generator)
        return hold_out("strongest", view, knowledge, self.validation, generator)

    def _folds(self, rows: int) -> int:
        """Return in how many folds `rows` auxiliary rows are held out; 1: a share of them once."""
        return 1 if round(self.validation * rows) >= ENOUGH else count_folds(rows, self.validation)

    def _closed_forms(self, held_out: HeldOut) -> Iterator[EnsembleMember]:
        yield attack_member("linear_inverse", load("attacks", "linear_inverse")())
        # A fifth of the rows is held out once more, to choose among these.
        counts = tuple(k for k in (1, 10) if 2 * k <= held_out.fewest)
        yield attack_member("nearest", load("attacks", "nearest")(neighbours=counts))

    def _decoders(self) -> Iterator[EnsembleMember]:
        for width, decoder in zip(self.widths, self._decoders_by_width(), strict=True):
            yield attack_member(f"inverse_network, width {width}", decoder, "epochs", self.epochs)

    def _decoders_by_width(self) -> list[Attack]:
        network = load("attacks", "inverse_network")
        how = {"batch_size": self.batch_size, "lr": self.lr, "queries": self.queries}
        return [network(width=width, **how) for width in self.widths]

    def _searches(self) -> Iterator[EnsembleMember]:
        for tv in SMOOTHING:
            yield attack_member(f"rmle, tv {tv:g}", load("attacks", "rmle")(tv=tv), "iterations", self.iterations)

    def _refinements(self, trials: Trials) -> Iterator[EnsembleMember]:
        held_out, first = trials.held_out, trials.chosen
        function, device = unwrap(held_out.knowledge.upstream), held_out.knowledge.device
        behind = {n: z[-len(held_out.x) :] for n, z in _released(held_out.view, device).items()}
        noise = measure_noise(function, held_out.x, behind)
        residual = max(held_out.error(trials.found[first]), LEAST_RESIDUAL)
        rate = RATE * float(unwrap(held_out.knowledge.auxiliary).std())
        for reach in REACH:

            def predict(
                view: View, known: Knowledge, size: int, drawn: torch.Generator, reach: float = reach
            ) -> Tensor:
                start = trials.predict(first, view, known).to(device)
                search = Refinement(_released(view, device), function, start, noise, residual, reach)
                return search.run(size, rate).cpu()

            yield EnsembleMember(f"refinement, reach {reach:g}", self.iterations, predict, begins_at=first)


class Trials:
    """Members that were tried: the predictions of each at the size at which it is best, `found`, and all attempts."""

    def __init__(self, held_out: HeldOut, seed: int, progress: Callable[[int], None]) -> None:
        self.held_out, self._seed, self._progress = held_out, seed, progress
        self.tried: list[Attempt] = []
        self.found: dict[str, Tensor] = {}
        self._errors: dict[str, float] = {}
        self._members: dict[str, tuple[EnsembleMember, int]] = {}
        self._weights: dict[str, float] = {}
        # Of the view that was asked about last: what members make of it.
        self._asked: tuple[View, dict[str, Tensor]] | None = None

    @property
    def chosen(self) -> str:
        """The member with the least error on the rows held out; of several the first."""
        return min(self._errors, key=lambda name: self._errors[name])

    @property
    def selection(self) -> Selection:
        """How the choice was made."""
        criterion = f"on held-out rows, in {len(folds)} folds" if (folds := self.held_out.folds) else "on held-out rows"
        return Selection(self.chosen, tuple(self.tried), criterion=criterion)

    def run(self, member: EnsembleMember, doublings: int) -> None:
        """Try a member, and twice as much of its work as long as that gains more than .2 dB."""
        double_work("mse", member.size, doublings if member.size else 0, partial(self._attempt, member))

    def run_best(self, members: Iterator[EnsembleMember], doublings: int) -> None:
        """Try each of `members` once, and double the best of them alone."""
        errors = [(self._attempt(member, member.size), member) for member in members]
        before, member = min(errors, key=lambda pair: pair[0])
        double_work("mse", member.size, doublings, partial(self._attempt, member), before)

    def combine(self) -> None:
        """Try the convex combination of all that was found, judged on rows that its weights were not fitted to."""
        started = time.perf_counter()
        weights, error = combine(self.held_out, list(self.found.values()))
        self._weights = {name: w for name, w in zip(self.found, weights, strict=True) if w > LEAST_WEIGHT}
        self._keep(COMBINATION, 0, error, time.perf_counter() - started)

    def predict(self, name: str, view: View, knowledge: Knowledge) -> Tensor:
        """Return what the member `name` predicts for a view, from all that is known there, rows held out included."""
        if view is self.held_out.view:
            return self.found[name]
        if self._asked is None or self._asked[0] is not view:
            self._asked = view, {}
        known = self._asked[1]
        if name not in known:
            known[name] = self._predict_anew(name, view, knowledge)
        return known[name]

    def _predict_anew(self, name: str, view: View, knowledge: Knowledge) -> Tensor:
        if name == COMBINATION:
            total = sum(self._weights.values())
            parts = [self.predict(n, view, knowledge) for n in self._weights]
            return weigh([w / total for w in self._weights.values()], parts)
        member, size = self._members[name]
        if not (member.learns or member.begins_at):
            return self.held_out.split(self.found[name])[0]
        return self._predict(member, size, self._draws(member, size), view, knowledge)

    def _attempt(self, member: EnsembleMember, size: int) -> float:
        started = time.perf_counter()
        predict = partial(self._predict, member, size, self._draws(member, size))
        held_out = self.held_out
        predictions = held_out.cross_predict(predict) if member.learns else predict(held_out.view, held_out.knowledge)
        error = self.held_out.error(predictions) if bool(torch.isfinite(predictions).all()) else math.inf
        if error < self._errors.get(member.name, math.inf):
            self.found[member.name], self._members[member.name] = predictions, (member, size)
        self._keep(member.name, size, error, time.perf_counter() - started)
        return error

    def _draws(self, member: EnsembleMember, size: int) -> torch.Generator:
        # Every attempt draws its own random numbers, so that one more of them changes none of the others.
        return torch.Generator().manual_seed(derive(self._seed, "member", member.name, size))

    def _predict(
        self, member: EnsembleMember, size: int, drawn: torch.Generator, view: View, knowledge: Knowledge
    ) -> Tensor:
        predictions = member.predict(view, knowledge, size, drawn)
        return predictions if knowledge.value_range is None else predictions.clamp(*knowledge.value_range)

    def _keep(self, name: str, size: int, error: float, seconds: float) -> None:
        self.tried.append(Attempt(name, size, seconds, error))
        self._errors[name] = min(error, self._errors.get(name, math.inf))
        self._progress(len(self.tried))


def attack_member(name: str, attack: Attack, parameter: str = "", size: int = 0) -> EnsembleMember:
    """Return `attack` as a member whose `parameter` is its work, `size` at first; without one it has no steps."""

    def predict(view: View, knowledge: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        sized = replace(attack, **{parameter: size}) if parameter else attack
        return sized(view, knowledge, drawn).prediction

    return EnsembleMember(name, size, predict, learns=Needs.AUXILIARY in attack.requires)


def _latent_search_work(
    view: View, few: Knowledge, sizes: tuple[float, float], begun: tuple[int, int], share: float, seen: float
) -> list[Work]:
    """Return the work of `latent_search`, begun so often: that of its prior, and of its two stages.

    `few`: what is known with few auxiliary rows, the `share` of all; `sizes`: of the second stage, altogether; `seen`:
    the share of victims among the releases it is tried on.
    """
    latent = load("attacks", "latent_search")()

    def prior(epochs: int) -> None:
        replace(latent, epochs=epochs).train_prior(few, torch.Generator().manual_seed(0))

    def search(first: int, second: int) -> None:
        short = replace(latent, epochs=1, latent_iterations=first, iterations=second)
        short(view, few, torch.Generator().manual_seed(0))

    least, most = begun
    return [
        Work(prior, latent.epochs * least, latent.epochs * most, begun, share),
        Work(
            lambda size: search(size, 0), latent.latent_iterations * least, latent.latent_iterations * most, begun, seen
        ),
        # What beginning takes is in the stage before.
        Work(lambda size: search(1, size), *sizes, (0, 0), seen),
    ]


def _training_attack_member(state: TrainedAttack) -> EnsembleMember:
    """Return the attack inside training as a member: it has learnt all it can."""

    def predict(view: View, knowledge: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        return state.predict(view, Target.INPUTS).detach().cpu()

    return EnsembleMember(f"{type(state.plan).__name__} in training", 0, predict)


def _released(view: View, device: torch.device) -> dict[str, Tensor]:
    return dict(view.select(kind="activation").tensors(device))
