"""Strongest: the reconstruction attacks of this house, with more and more work, chosen on the adversary's own rows.

Source: ours. Its members are `linear_inverse`, `nearest`, `inverse_network` of several widths and, where the upstream
weights are granted, `rmle` and a search that begins at the best decoder's rows (`refinement`); where an attack was in
the training, what that predicts; and last a convex combination of all of them, its weights by least squares.

The choice is the adversary's: some of its rows are held out, their releases stand behind the victims' without a mark,
and the member with the least squared error on them makes the prediction. The truth has no part in it. A member that
takes steps is tried with twice as many until that gains less than .2 dB or `doublings` is reached; which of the two it
was is said (`Selection.converged`): a figure that has not converged is a lower bound of what leaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import (
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
from splitfed.attacks.reconstruction.combination import combine
from splitfed.attacks.reconstruction.held_out import HeldOut, hold_out
from splitfed.attacks.reconstruction.refinement import Refinement, measure_noise
from splitfed.attacks.selection import CONVERGED, Attempt, Selection, decibels
from splitfed.core.errors import InvalidInput, check_count, require_count, require_number
from splitfed.core.messages import View
from splitfed.core.random import derive
from splitfed.registry import load

QUICK = {"widths": (16,), "epochs": 5, "iterations": 150, "doublings": 1}
STANDARD = {"widths": (16, 32), "epochs": 10, "iterations": 300, "doublings": 3}
FULL = {"widths": (16, 32, 64), "epochs": 20, "iterations": 600, "doublings": 5}

SMOOTHING = (0.0, 1e-3, 1e-2, 1e-1)
"""Weights of the total variation among which the search from nothing chooses."""
REACH = (0.3, 3.0, 30.0)
"""How far a refinement may go from the first prediction, among which it chooses."""
RATE = 0.01
"""Adam's rate for a refinement, in the unit of the data's standard deviation."""
LEAST_RESIDUAL = 1e-12
"""Mean squared error of a first prediction that is taken for exact."""


class Member(NamedTuple):
    """An attack among others: its `name`, and its predictions for victims and rows held out after `size` of its work.

    `size`: what it is tried with first; 0 where it has no steps.
    """

    name: str
    size: int
    predict: Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Strongest(Attack):
    """Decoders of `widths` from `epochs` on, searches from `iterations` on, each doubled at most `doublings` times.

    The share `validation` of the auxiliary rows chooses. `batch_size`, `lr` and `queries` are those of
    `inverse_network`. Budgets are called "quick", "standard" and "full"; "fast", "default" and "paper" are the same.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    uses: ClassVar[frozenset[Needs]] = frozenset({Needs.UPSTREAM, Needs.TRAINING_ATTACK})
    budgets: ClassVar[Budgets] = {
        "fast": QUICK,
        "default": STANDARD,
        "paper": FULL,
        "quick": QUICK,
        "standard": STANDARD,
        "full": FULL,
    }

    widths: tuple[int, ...] = (16, 32)
    epochs: int = field(default=10, metadata=require_count("strongest epochs", low=1))
    iterations: int = field(default=300, metadata=require_count("strongest iterations", low=1))
    doublings: int = field(default=3, metadata=require_count("strongest doublings", low=1))
    batch_size: int = field(default=32, metadata=require_count("strongest batch_size", low=1))
    lr: float = field(default=3e-3, metadata=require_number("strongest lr", low=0.0, open_low=True))
    queries: int = field(default=5, metadata=require_count("strongest queries", low=1))
    validation: float = field(
        default=0.2, metadata=require_number("strongest validation", low=0.0, high=1.0, open_low=True, open_high=True)
    )

    def __post_init__(self) -> None:
        """Refuse no widths, and widths that are no whole numbers, too."""
        super().__post_init__()
        if not isinstance(self.widths, (tuple, list)) or not self.widths:
            raise InvalidInput(f"strongest widths={self.widths!r} is not allowed; expected one whole number or more")
        for width in self.widths:
            check_count("strongest widths", width, low=1)

    def run(
        self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress
    ) -> PredictionAndSelection:
        """Return the chosen member's rows for the releases in the view, (victims, *shape), and how it was chosen."""
        held_out = hold_out("strongest", view, knowledge, self.validation, generator)
        white_box, inside = knowledge.upstream is not None, knowledge.training_attack is not None
        most = 3 + inside + len(self.widths) * (1 + self.doublings) + white_box * (7 + 2 * self.doublings)
        trials = Trials(held_out, generator.initial_seed(), lambda done: progress(done, most))
        for member in self._closed_forms(held_out):
            trials.run(member, 0)
        if inside and (asked := _ask_training_attack(unwrap(knowledge.training_attack), held_out)) is not None:
            trials.run(asked, 0)
        for member in self._decoders(held_out):
            trials.run(member, self.doublings)
        if white_box:
            trials.run_best(self._searches(held_out), self.doublings)
            trials.run_best(self._refinements(held_out, trials.best()), self.doublings)
        trials.combine()
        progress(most, most)
        chosen = trials.chosen
        return PredictionAndSelection(held_out.split(trials.found[chosen])[0], Selection(chosen, tuple(trials.tried)))

    def _closed_forms(self, held_out: HeldOut) -> Iterator[Member]:
        yield attack_member("linear_inverse", held_out, load("attacks", "linear_inverse")())
        # A fifth of the rows is held out once more, to choose among these.
        counts = tuple(k for k in (1, 10) if 2 * k <= len(unwrap(held_out.knowledge.auxiliary)))
        yield attack_member("nearest", held_out, load("attacks", "nearest")(neighbours=counts))

    def _decoders(self, held_out: HeldOut) -> Iterator[Member]:
        network = load("attacks", "inverse_network")
        for width in self.widths:
            decoder = network(width=width, batch_size=self.batch_size, lr=self.lr, queries=self.queries)
            yield attack_member(f"inverse_network, width {width}", held_out, decoder, "epochs", self.epochs)

    def _searches(self, held_out: HeldOut) -> Iterator[Member]:
        for tv in SMOOTHING:
            search = load("attacks", "rmle")(tv=tv)
            yield attack_member(f"rmle, tv {tv:g}", held_out, search, "iterations", self.iterations)

    def _refinements(self, held_out: HeldOut, start: Tensor) -> Iterator[Member]:
        device = held_out.knowledge.device
        function = unwrap(held_out.knowledge.upstream)
        released = held_out.view.select(kind="activation").tensors(device)
        behind = {name: z[-len(held_out.x) :] for name, z in released.items()}
        noise, residual = measure_noise(function, held_out.x, behind), max(held_out.error(start), LEAST_RESIDUAL)
        rate = RATE * float(unwrap(held_out.knowledge.auxiliary).std())
        for reach in REACH:
            search = Refinement(released, function, start.to(device), noise, residual, reach)
            yield Member(f"refinement, reach {reach:g}", self.iterations, partial(_refine, search, rate))


class Trials:
    """Members that were tried: the predictions of each at the size at which it is best, `found`, and all attempts."""

    def __init__(self, held_out: HeldOut, seed: int, progress: Callable[[int], None]) -> None:
        self.held_out, self._seed, self._progress = held_out, seed, progress
        self.tried: list[Attempt] = []
        self.found: dict[str, Tensor] = {}
        self._errors: dict[str, float] = {}

    @property
    def chosen(self) -> str:
        """The member with the least error on the rows held out; of several the first."""
        return min(self._errors, key=lambda name: self._errors[name])

    def best(self) -> Tensor:
        """Return the predictions of the member that is `chosen` so far, (victims + rows held out, *shape)."""
        return self.found[self.chosen]

    def run(self, member: Member, doublings: int) -> None:
        """Try a member, and twice as much of its work as long as that gains more than `CONVERGED`."""
        before = self._attempt(member, member.size)
        for doubling in range(1, doublings + 1 if member.size else 1):
            after = self._attempt(member, member.size * 2**doubling)
            if decibels(before, after) < CONVERGED:
                break
            before = after

    def run_best(self, members: Iterator[Member], doublings: int) -> None:
        """Try each of `members` once, and double the best of them alone."""
        errors = [(self._attempt(member, member.size), member) for member in members]
        before, member = min(errors, key=lambda pair: pair[0])
        for doubling in range(1, doublings + 1):
            after = self._attempt(member, member.size * 2**doubling)
            if decibels(before, after) < CONVERGED:
                break
            before = after

    def combine(self) -> None:
        """Try the convex combination of all that was found, judged on rows that its weights were not fitted to."""
        started = time.perf_counter()
        predictions, error = combine(self.held_out, list(self.found.values()))
        self._keep("combination", 0, predictions, error, time.perf_counter() - started)

    def _attempt(self, member: Member, size: int) -> float:
        # Every attempt draws its own random numbers, so that one more of them changes none of the others.
        drawn = torch.Generator().manual_seed(derive(self._seed, "member", member.name, size))
        started = time.perf_counter()
        predictions = member.predict(size, drawn)
        if (span := self.held_out.knowledge.value_range) is not None:
            predictions = predictions.clamp(*span)
        finite = bool(torch.isfinite(predictions).all())
        error = self.held_out.error(predictions) if finite else float("inf")
        self._keep(member.name, size, predictions, error, time.perf_counter() - started)
        return error

    def _keep(self, name: str, size: int, predictions: Tensor, error: float, seconds: float) -> None:
        self.tried.append(Attempt(name, size, seconds, error))
        if name not in self._errors or error < self._errors[name]:
            self._errors[name], self.found[name] = error, predictions
        self._progress(len(self.tried))


def attack_member(name: str, held_out: HeldOut, attack: Attack, parameter: str = "", size: int = 0) -> Member:
    """Return `attack` as a member whose `parameter` is its work, `size` at first; without one it has no steps."""

    def predict(size: int, drawn: torch.Generator) -> Tensor:
        sized = replace(attack, **{parameter: size}) if parameter else attack
        return sized(held_out.view, held_out.knowledge, drawn).prediction

    return Member(name, size, predict)


def _refine(search: Refinement, rate: float, size: int, drawn: torch.Generator) -> Tensor:
    return search.run(size, rate).cpu()


def _ask_training_attack(state: TrainedAttack, held_out: HeldOut) -> Member | None:
    """Return the attack inside training as a member, or None where it reconstructs nothing."""
    if getattr(state.plan, "target", None) is not Target.INPUTS:
        return None

    def predict(size: int, drawn: torch.Generator) -> Tensor:
        return state.predict(held_out.view, Target.INPUTS).detach().cpu()

    return Member(f"{type(state.plan).__name__} in training", 0, predict)
