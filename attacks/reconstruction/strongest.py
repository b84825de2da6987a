"""Strongest: a race of this project's reconstruction attacks with counted work, chosen on rows of the adversary's own.

Paper: none; after He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019, for the two
threat models; Jamieson, Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS
2016, for the race (`splitfed.attacks.reconstruction.race`); Breiman, "Stacked regressions", Machine Learning 1996, for
the combination.

In the threat model "black_box" the adversary has releases, auxiliary rows and queries: members are `linear_inverse`,
`nearest` and `inverse_network` of several widths, for tables with synthetic rows. If every query of a row has the same
answer, `query_inversion` with and without a prior race too, after the decoders, with as much work again (twice as much
for tables); a query is a row pass. In "white_box" the adversary has the client's weights too, and as much work:
`lbfgs_inversion` with and without a prior and, in the longest budget, `latent_search` race with each other. For images
a first look at all members is the first rung of that race; if searches are ahead in it, they get the work of the
decoders too. If releases are not
a function of the row alone, a fifth of the searches' work is for a search that starts from the best prediction so far
(`refinement`). If a training attack was in the run, its prediction is a member. The last candidate is a convex
combination of all members, with weights from least squares.

The choice is the adversary's: some of its rows are held out, their releases follow the victims' without a mark, and the
member with the least squared error on them makes the prediction, after training on all rows. The victims' truth is not
used. A few outliers would decide among fewer than `ENOUGH` held-out rows: with fewer than `FEWEST` times as many
auxiliary rows, all rows are held out in turn, in folds, and members that learn from them are trained once in each. The
choice is by the mean over rows, as an attack is scored by the mean over victims; medians and trimmed means estimate
something else, and chose worse on heavy-tailed tables.

`Selection.converged` states whether doubling the work of the chosen member gains less than .2 dB: a score that has not
converged is a lower bound of the leakage.
"""

from __future__ import annotations

import math
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
    Outcome,
    Progress,
    Releases,
    Target,
    TrainedAttack,
    unwrap,
)
from splitfed.attacks.networks.query_passes import is_repeatable
from splitfed.attacks.reconstruction.held_out import HeldOut, count_folds, hold_out, hold_out_in_folds
from splitfed.attacks.reconstruction.race import EnsembleMember, Trials, attempts_of, rungs
from splitfed.attacks.reconstruction.refinement import Refinement, measure_noise
from splitfed.attacks.threat_model import BLACK_BOX, WHITE_BOX
from splitfed.attacks.work import BATCHES, OneOf, Work
from splitfed.core.errors import require_count, require_counts, require_name, require_number, require_share
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows
from splitfed.registry import load

QUICK = {"widths": (32,), "passes": 60_000, "prior": False}
STANDARD = {"widths": (16, 32, 64), "passes": 500_000, "prior": False}
FULL = {"widths": (16, 32, 64), "passes": 5_000_000, "prior": True}

REACH = (0.3, 3.0, 30.0)
"""Candidate reaches of a refinement: how far it may go from the first prediction."""
RATE = 0.01
"""Adam's rate for a refinement, in units of the data's standard deviation."""
REFINED = 0.2
"""Share of the searches' work for refinements, if there are any."""
LEAST_RESIDUAL = 1e-12
"""Mean squared error below which a first prediction counts as exact."""
DETERMINED = 1e-7
"""Releases whose difference from the computed ones is a smaller share of their variance are functions of the row."""
ENOUGH, FEWEST = 30, 3
"""Number of held-out rows that suffices for a choice, and the factor of auxiliary rows above which there are no folds.

Folds multiply the work of members that learn by their number, up to ten, and gain less the more rows are held out.
"""
SEARCHED = 16
"""Number of held-out images on which a search is tried: it takes as long for each as for a victim.

For tables, whose rows are cheap and have heavy tails, it is tried on all held-out rows.
"""
LOOK, AHEAD = 0.1, 1.6
"""Share of the work for the look that shows whether searches are ahead, and the ratio of errors that counts as ahead.

A decoder of images that is 2 dB behind rarely catches up, as both gain by more work; a decoder of a table may.
"""
MOST = 64
"""Maximum number of rows held out once: more hardly improve the choice, and every search is run on each of them."""
ALL_BUT = 0.1
"""Share of held-out rows above which a member that learnt without them is trained again on all rows."""
SYNTHETIC, TABLES = 1, 4
"""Synthetic rows for each auxiliary row of a table, and the factor by which decoders of tables are narrower.

For images synthetic rows are no images and make a decoder worse.
"""
PRIORS = (0.0, 1e-4)
"""Weights of the Gaussian prior of a search, in addition to the weight that noise requires."""
EVALUATIONS = 1.15
"""Approximate number of evaluations of loss and gradient in a step of L-BFGS."""


class _Rows(NamedTuple):
    """Numbers of rows: `victims`, auxiliary rows `held` out and `kept` to learn from, in each of `folds` (1: once).

    `images`: whether they are images.
    """

    victims: int
    held: int
    kept: int
    folds: int
    images: bool

    @property
    def searched(self) -> int:
        """Number of held-out rows on which a search is tried."""
        held = math.ceil(self.held / self.folds)
        return min(SEARCHED, held) if self.images else held

    @property
    def anew(self) -> bool:
        """Whether members that learn from the kept rows are trained again on all rows."""
        return self.folds > 1 or self.held > ALL_BUT * (self.held + self.kept)


class _Plan(NamedTuple):
    """The races: `decoders` with `passes` row passes, and `searches` with the rest of the `total`.

    `look`: row passes of each member in the first look, which shows whether searches are ahead of decoders, which then
    have no race, and which search goes on; 0: no look.
    """

    decoders: list[EnsembleMember]
    searches: list[EnsembleMember]
    passes: float
    total: float
    look: float

    @property
    def members(self) -> list[EnsembleMember]:
        """All members that race."""
        return [*self.decoders, *self.searches]


@dataclass(frozen=True)
class Strongest(Attack):
    """A race of `passes` row passes among decoders, and one of as many among searches if there are any.

    `widths`: of the decoders of images (a quarter for tables). `threat_model`: "black_box", "white_box", or None: that
    of the adversary in the run, "white_box" if it receives the client's weights. `prior`: whether `latent_search` takes
    part. `validation`: share of the auxiliary rows that is held out, at least `ENOUGH` and at most `MOST` rows; of
    fewer than `FEWEST` times `ENOUGH` rows all are, in 1 / `validation` folds (2 to 10), with members trained once in
    each.
    `batch_size`, `lr` and `queries` are those of `inverse_network`.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    adapts_to = FORWARD
    trains_decoder: ClassVar[bool] = True
    budgets: ClassVar[Budgets] = {"quick": QUICK, "standard": STANDARD, "full": FULL}

    widths: tuple[int, ...] = field(default=(16, 32, 64), metadata=require_counts("strongest widths", low=1))
    passes: int = field(default=500_000, metadata=require_count("strongest passes", low=1))
    threat_model: str | None = field(
        default=None, metadata=require_name("strongest threat_model", (BLACK_BOX, WHITE_BOX))
    )
    prior: bool = False
    batch_size: int = field(default=32, metadata=require_count("strongest batch_size", low=1))
    lr: float = field(default=3e-3, metadata=require_number("strongest lr", low=0.0, open_low=True))
    queries: int = field(default=5, metadata=require_count("strongest queries", low=1))
    validation: float = field(default=0.2, metadata=require_share("strongest validation"))

    @property
    def uses(self) -> frozenset[Needs]:
        """Needs of some members, beyond what all of them require."""
        return frozenset({Needs.TRAINING_ATTACK, *([Needs.UPSTREAM] if self.threat_model == WHITE_BOX else [])})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Outcome:
        """Return the chosen member's reconstructions of the releases, (victims, *shape), and the selection."""
        trials = self.compare(view, knowledge, generator, progress)
        prediction = trials.predict(trials.chosen, view, knowledge)
        return Outcome(prediction, selection=trials.selection)

    def compare(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Trials:
        """Return the trials of all members on held-out rows."""
        held_out = self._hold_out(view, knowledge, generator)
        white_box, state = knowledge.upstream is not None, knowledge.training_attack
        rows = _count_rows(held_out, knowledge)
        noise = _noise(held_out) if white_box else 0.0
        plan = self._plan(rows, knowledge, noise, held_out)
        most = 4 + sum(map(attempts_of, (len(plan.decoders), len(plan.searches), bool(noise) * len(REACH))))
        most += bool(plan.look) * len(plan.members)

        def done(attempts: int) -> None:
            progress(min(attempts, most - 1), most)

        trials = Trials(held_out, generator.initial_seed(), done, rows.anew, rows.searched)
        for member in self._closed_forms(held_out):
            trials.run(member)
        if state is not None and getattr(state.plan, "target", None) is Target.INPUTS:
            trials.run(_training_attack_member(state))
        left = plan.total
        if plan.look:
            left -= trials.look(plan.members, plan.look)
        if not plan.look or not trials.leads(plan.searches, plan.decoders, AHEAD):
            trials.race(plan.decoders, plan.passes)
            left -= plan.passes
        if plan.searches:
            trials.race(plan.searches, (1 - REFINED) * left if noise else left, looked=plan.look > 0)
        if noise:
            trials.race(self._refinements(trials, noise, rows), REFINED * left)
        trials.combine()
        progress(most, most)
        return trials

    def work(self, view: View, knowledge: Knowledge) -> list[Work | OneOf]:
        """Return the work of the attack: closed forms, the first rung of each race, and its rest by one member."""
        every = len(unwrap(knowledge.auxiliary))
        folds = self._folds(every)
        held = every if folds > 1 else round(self._share(every) * every)
        victims = len(next(iter(_released(view, knowledge.device).values())))
        rows = _Rows(victims, held, every - math.ceil(held / folds), folds, len(knowledge.shape) == 3)
        few = replace(knowledge, auxiliary=unwrap(knowledge.auxiliary)[: min(rows.kept, BATCHES * self.batch_size)])

        measured: dict[str, Work] = {}

        def piece(member: EnsembleMember, size: float) -> Work:
            share = victims / rows.searched if member.searches else len(unwrap(few.auxiliary)) / (rows.kept * folds)

            def run(size: int) -> object:
                return member.predict(view, few, size, torch.Generator().manual_seed(0))

            timed = measured.setdefault(member.name, Work(run, size, size, share=share, timed=member.least))
            # A search ends where all of its rows have converged.
            return replace(timed, least=0 if member.searches else size, most=size)

        closed = [load("attacks", name)() for name in ("linear_inverse", "nearest")]
        found: list[Work | OneOf] = [
            Work(partial(_closed, attack, view, knowledge), 0, 0, (folds, folds + 1)) for attack in closed
        ]
        white_box, x = knowledge.upstream is not None, unwrap(few.auxiliary)
        noise = _measure_noise(knowledge, x, unwrap(knowledge.query)(x)) if white_box else 0.0
        plan = self._plan(rows, knowledge, noise)

        def race(members: list[EnsembleMember], passes: float, looked: bool) -> list[Work | OneOf]:
            (_, first), *_ = rungs(len(members), passes, max(member.last for member in members))
            able = [member for member in members if member.size(first)]
            begun = [member for member in able if not (looked and member.size(plan.look))]
            pieces: list[Work | OneOf] = [piece(member, member.size(first)) for member in begun]
            left = passes - sum(member.work(member.size(first)) for member in begun)
            return [*pieces, OneOf([[piece(member, left / member.passes)] for member in able])] if able else []

        apart = race(plan.decoders, plan.passes, looked=False)
        if not plan.searches:
            return [*found, *apart]
        left = plan.total - plan.look * len(plan.members)
        apart += race(plan.searches, left - plan.passes, looked=plan.look > 0)
        if not plan.look:
            return [*found, *apart]
        looks = [piece(member, size) for member in plan.members if (size := member.size(plan.look))]
        return [*found, *looks, OneOf([apart, race(plan.searches, left, looked=True)])]

    def _hold_out(self, view: View, knowledge: Knowledge, generator: torch.Generator) -> HeldOut:
        """Return the held-out rows: a share of them once if these are enough, else all of them in turn."""
        rows = len(unwrap(knowledge.auxiliary))
        if self._folds(rows) > 1:
            return hold_out_in_folds("strongest", view, knowledge, self.validation, generator)
        return hold_out("strongest", view, knowledge, self._share(rows), generator)

    def _share(self, rows: int) -> float:
        """Return the share of `rows` auxiliary rows that is held out once."""
        return min(max(self.validation, ENOUGH / rows), MOST / rows)

    def _folds(self, rows: int) -> int:
        """Return the number of folds in which `rows` auxiliary rows are held out; 1: a share of them once."""
        return 1 if rows >= FEWEST * ENOUGH else count_folds(rows, self.validation)

    def _closed_forms(self, held_out: HeldOut) -> Iterator[EnsembleMember]:
        yield attack_member("linear_inverse", load("attacks", "linear_inverse")())
        # A fifth of the rows is held out once more, to choose among these.
        counts = tuple(k for k in (1, 10) if 2 * k <= held_out.fewest)
        yield attack_member("nearest", load("attacks", "nearest")(neighbours=counts))

    def _plan(self, rows: _Rows, knowledge: Knowledge, noise: float, held_out: HeldOut | None = None) -> _Plan:
        """Return the plan: searches have as much as decoders, and of tables, where more rows are tried, twice that.

        No look under noise, nor of tables: searches may be ahead there, and decoders come up.
        """
        decoders = self._decoders(rows)
        if knowledge.upstream is not None:
            searches = self._searches(rows)
        # Rows held out once were asked for again unless a second answer was the first one.
        elif (
            held_out.count == len(held_out.x)
            if held_out and not held_out.folds
            else is_repeatable(unwrap(knowledge.query), unwrap(knowledge.auxiliary))
        ):
            searches = self._query_searches(rows, knowledge)
        else:
            searches = []
        total = float(self.passes) * (1 if not searches else 2 if rows.images else 3)
        looks = bool(searches) and rows.images and not noise
        look = LOOK * total / (len(decoders) + len(searches)) if looks else 0.0
        return _Plan(decoders, searches, float(self.passes), total, look)

    def _decoders(self, rows: _Rows) -> list[EnsembleMember]:
        """Return the decoders, with the row passes that they take on these numbers of `rows`."""
        network, found = load("attacks", "inverse_network"), []
        last = 1 / rows.folds if rows.anew else 0.0
        for width in self.widths:
            decoder = network(
                width=width if rows.images else max(width // TABLES, 1),
                batch_size=self.batch_size,
                lr=self.lr,
                queries=self.queries,
                synthetic=0 if rows.images else SYNTHETIC,
            )
            member = attack_member(f"inverse_network, width {decoder.width}", decoder, "epochs")
            passes = rows.kept * rows.folds * (1 + decoder.synthetic)
            found.append(member._replace(passes=passes, last=last))
        return found

    def _searches(self, rows: _Rows) -> list[EnsembleMember]:
        """Return the searches, which use the client's weights, likewise."""
        found, tried = [], rows.searched
        last = rows.victims / tried
        for prior in PRIORS:
            attack = load("attacks", "lbfgs_inversion")(queries=self.queries, prior=prior, double=True)
            search = attack_member(f"lbfgs_inversion, prior {prior:g}", attack, "iterations")
            found.append(search._replace(searches=True, passes=EVALUATIONS * tried, last=last, least=10))
        if self.prior:
            latent = load("attacks", "latent_search")()
            start = latent.epochs * rows.kept + tried * latent.restarts * latent.latent_iterations
            member = attack_member("latent_search", latent, "iterations")
            found.append(member._replace(searches=True, passes=tried, start=start, last=last, least=10))
        return found

    def _query_searches(self, rows: _Rows, knowledge: Knowledge) -> list[EnsembleMember]:
        """Return what searches by queries, likewise."""
        found, tried = [], rows.searched
        for prior in PRIORS:
            # Rows held out are not queried beside these: no answer depends on the others of its batch.
            attack, query = load("attacks", "query_inversion")(prior=prior), knowledge.query
            search = attack_member(f"query_inversion, prior {prior:g}", attack, "row_queries", query)
            found.append(search._replace(searches=True, passes=tried, last=rows.victims / tried, least=30))
        return found

    def _refinements(self, trials: Trials, noise: float, rows: _Rows) -> list[EnsembleMember]:
        held_out, first = trials.held_out, trials.chosen
        function, device = unwrap(held_out.knowledge.upstream), held_out.knowledge.device
        residual = max(held_out.error(trials.found[first]), LEAST_RESIDUAL)
        rate = RATE * float(unwrap(held_out.knowledge.auxiliary).std())
        found = []
        for reach in REACH:

            def predict(
                view: View, known: Knowledge, size: int, drawn: torch.Generator, reach: float = reach
            ) -> Tensor:
                tried = view is trials.searched[0]
                start = trials.found[first][: rows.searched] if tried else trials.predict(first, view, known)
                search = Refinement(_released(view, device), function, start.to(device), noise, residual, reach)
                return search.run(size, rate).cpu()

            name, last = f"refinement, reach {reach:g}", rows.victims / rows.searched
            member = EnsembleMember(name, predict, searches=True, passes=rows.searched, last=last)
            found.append(member._replace(least=10))
        return found


def _closed(attack: Attack, view: View, knowledge: Knowledge, size: int) -> object:
    return attack(view, knowledge, torch.Generator().manual_seed(0))


def attack_member(
    name: str, attack: Attack, parameter: str = "", query: Callable[[Tensor], Releases] | None = None
) -> EnsembleMember:
    """Return `attack` as a member whose size is its `parameter`; without one it has no steps.

    `query`: asked instead of the one that is known (None: that).
    """

    def predict(view: View, knowledge: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        sized = replace(attack, **{parameter: size}) if parameter else attack
        known = knowledge if query is None else replace(knowledge, query=query)
        return sized(view, known, drawn).prediction

    return EnsembleMember(name, predict, learns=Needs.AUXILIARY in attack.requires)


def _count_rows(held_out: HeldOut, knowledge: Knowledge) -> _Rows:
    victims = len(next(iter(_released(held_out.view, knowledge.device).values()))) - len(held_out.x)
    folds = max(len(held_out.folds), 1)
    return _Rows(victims, held_out.count, held_out.fewest, folds, len(knowledge.shape) == 3)


def _noise(held_out: HeldOut) -> float:
    """Return `_measure_noise` of the held-out rows."""
    return _measure_noise(held_out.knowledge, held_out.x, _released(held_out.own, held_out.knowledge.device))


def _measure_noise(knowledge: Knowledge, x: Tensor, released: Releases) -> float:
    """Return the mean squared difference of releases from those computed with the weights; 0 if they are equal."""
    noise = measure_noise(unwrap(knowledge.upstream), x, released)
    variance = float(torch.cat([flat_rows(z) for z in released.values()], 1).var(0, correction=0).mean())
    return noise if noise > DETERMINED * variance else 0.0


def _training_attack_member(state: TrainedAttack) -> EnsembleMember:
    """Return the training attack of the run as a member; it learns nothing further."""

    def predict(view: View, knowledge: Knowledge, size: int, drawn: torch.Generator) -> Tensor:
        return state.predict(view, Target.INPUTS).detach().cpu()

    return EnsembleMember(f"{type(state.plan).__name__} in training", predict)


def _released(view: View, device: torch.device) -> dict[str, Tensor]:
    return dict(view.select(kind="activation").tensors(device))
