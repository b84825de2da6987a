"""Strongest label attack: the best of this project's label attacks, chosen on victims whose labels the adversary knows.

Paper: none; after Fu, Zhang, Ji, Chen, Wu, Guo, Zhou, Liu, Wang, "Label inference attacks against vertical federated
learning", USENIX Security 2022, whose adversary knows a few labels; here these choose among attacks.

Its members are `direct_label`, `batch_label_inference`, `unsplit_labels`, `similar`, `norm`, `direction`, `spectral`,
`gaussian_mixture`, `co_training`, `own_features`, `insider_labels`, `model_completion` (with all labels that it can
use, and with 4 of each class) and `exploit`: as far as the run grants their requirements and has such labels.
`Selection.left_out` states why a member does not take part.

No party can start a training step with rows and labels of its own, so predictions from gradients can be tested on
victims only. The adversary therefore knows `hints` of each class, which are not scored. All members predict these as
well, and the one with the greatest AUC (two classes) or accuracy on them makes the prediction. `co_training`, which
reads all that the others read, is preferred if its error exceeds the least by at most its own standard deviation on so
few victims. Among other equally good members the one is chosen that agrees most with the rest of them on all victims;
among equally good sizes of a member's work, the smallest. A member that learns from known victims is tested by two-fold
cross-validation on them, and then learns from all. `model_completion`, which also predicts rows that took no training
step, is tested on the share `validation` of the labelled auxiliary rows too, and is not retrained with these. If the
sign of a score is a guess (`norm`, `spectral`), the negated score is a member too. A single score of two classes is
shifted so that zero separates known victims best. No other label is used.

With fewer than two known victims of each class the first member in the order above is taken (`Selection.criterion` says
so); errors are NaN, and no member but `model_completion` does more work. The steps of a member are doubled until a
doubling gains less than .01 or `doublings` is reached; `Selection.converged` states which.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import (
    Attack,
    Budgets,
    DefenseEffect,
    Knowledge,
    Needs,
    Outcome,
    Progress,
    check_classes,
    unwrap,
)
from splitfed.attacks.budgets import double_work
from splitfed.attacks.labels.known_labels import name_clusters
from splitfed.attacks.labels.known_victims import ROUNDING, KnownVictims, most_agreed
from splitfed.attacks.labels.label_attack import LabelAttack
from splitfed.attacks.selection import Attempt, LeftOut, Selection
from splitfed.core.errors import InvalidInput, require_count, require_share
from splitfed.core.messages import View
from splitfed.core.random import derive
from splitfed.registry import load

QUICK = {"iterations": 200, "doublings": 1}
STANDARD = {"iterations": 400, "doublings": 2}
FULL = {"iterations": 800, "doublings": 4}
LEAST_HINTS, ALL_HINTS = 2, 12
FEW = 4
"""Number of labelled rows of each class in the paper of `model_completion`."""
PASSES = 8.0
"""Product of the iterations of `model_completion` and 1 - decay of its running average, as in its budgets."""
KNOWN, IN_ORDER = "on known victims", "by the stated order of members"


class LabelMember(NamedTuple):
    """A candidate attack: its `name`, the attack for each `size` of its work, and the first size (0: no steps).

    `needs`: what must be granted beyond the attack's requirements; `learns`: whether it learns from known victims;
    `named`: whether these assign its clusters to classes; `turned`: whether its scores are negated; `rows`: whether
    labelled auxiliary rows test it as well; `fuses`: whether it reads both inputs of the other members, own columns and
    gradients.
    """

    name: str
    attack: Callable[[int], Attack]
    size: int = 0
    needs: frozenset[Needs] = frozenset()
    learns: bool = False
    named: bool = False
    turned: bool = False
    rows: bool = False
    fuses: bool = False


class _Found(NamedTuple):
    """The best attempt of a member: its error, the member, the size of its work and its scores of the victims."""

    error: float
    member: LabelMember
    size: int
    scores: Tensor


@dataclass(frozen=True)
class StrongestLabels(LabelAttack):
    """The best of several attacks on labels, chosen on known victims.

    Members take `iterations` at first, doubled at most `doublings` times; `hints` victims of each class are known
    (None: twelve in all, and at least two of each class). `validation`: see the head of this module.
    """

    adapts_to = frozenset[DefenseEffect]()
    uses: ClassVar[frozenset[Needs]] = frozenset(
        {Needs.OWN_INPUTS, Needs.HEAD, Needs.AUXILIARY_LABELS, Needs.TRAINING_ATTACK}
    )
    budgets: ClassVar[Budgets] = {"quick": QUICK, "standard": STANDARD, "full": FULL}

    iterations: int = field(default=400, metadata=require_count("strongest_labels iterations", low=1))
    doublings: int = field(default=2, metadata=require_count("strongest_labels doublings", low=1))
    hints: int | None = field(default=None, metadata=require_count("strongest_labels hints"))
    validation: float = field(default=0.2, metadata=require_share("strongest_labels validation"))

    def asks(self, classes: int | None) -> dict[int, int]:
        """Return the number of known victims required of each class: class -> `hints`."""
        count = check_classes("strongest_labels", classes)
        each = max(LEAST_HINTS, math.ceil(ALL_HINTS / count)) if self.hints is None else self.hints
        return dict.fromkeys(range(count), each) if each else {}

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Outcome:
        """Return the chosen member's scores of labels, (victims, classes) or (victims,), and the selection."""
        trials = self.compare(view, knowledge, generator, progress)
        prediction, member = trials.predict(trials.chosen), trials.attack(trials.chosen)
        return Outcome(prediction, selection=trials.selection, member=member)

    def compare(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> LabelTrials:
        """Return the trials of every member that takes part; raise `InvalidInput` if none does."""
        known = KnownVictims(knowledge.hints, check_classes("strongest_labels", knowledge.classes))
        trials = LabelTrials(view, knowledge, known, generator.initial_seed(), self.validation)
        members = list(self.members(knowledge, known))
        for number, member in enumerate(members):
            trials.run(member, self.doublings, _fix(progress, number, len(members)))
            # As long as all were refused nothing has begun.
            if trials.found:
                progress(number + 1, len(members))
        if not trials.found:
            reasons = "; ".join(f"{one.member}: {one.reason}" for one in trials.left_out)
            raise InvalidInput(f"strongest_labels has no member that can attack here: {reasons}")
        return trials

    def members(self, knowledge: Knowledge, known: KnownVictims) -> Iterator[LabelMember]:
        """Yield all members, granted or not, in the order of preference among equally good ones."""
        count = known.least
        learnt: dict[str, Any] = {"learns": True, "hints": max(count, 1)}
        yield _member("direct_label")
        yield _member("batch_label_inference", self.iterations)
        yield _member("unsplit_labels", self.iterations, **learnt)
        yield _member("similar", **learnt)
        yield _member("similar", name="similar, k-means", method="k-means", **learnt)
        yield _member("norm")
        yield _member("direction", **learnt)
        yield _member("spectral")
        yield _member("gaussian_mixture", **learnt)
        yield _member("co_training", fuses=True, **learnt)
        yield _member("own_features", **learnt)
        yield _member("spectral", name="spectral, releases", needs=Needs.RELEASES, rows="releases")
        yield _member("insider_labels")
        yield from self._completions(knowledge, known)
        sent: dict[str, Any] = {"rows": "sent", "measure": "euclidean", **learnt}
        yield _member("similar", name="similar, sent", needs=Needs.OWN_INPUTS, **sent)
        yield _member("exploit", self.iterations, named=count > 0)
        yield _member("norm", name="norm, turned over", turned=True)
        yield _member("spectral", name="spectral, turned over", turned=True)
        over: dict[str, Any] = {"rows": "releases", "turned": True}
        yield _member("spectral", name="spectral, releases, turned over", needs=Needs.RELEASES, **over)

    def _completions(self, knowledge: Knowledge, known: KnownVictims) -> Iterator[LabelMember]:
        """Yield `model_completion` with all usable labels of each class, and with the few of its paper."""
        completion, labels = load("attacks", "model_completion"), knowledge.auxiliary_labels
        least = 0 if labels is None else int(torch.bincount(labels.long().cpu(), minlength=known.classes).min())
        least -= math.floor(self.validation * least)

        def sized(size: int, labelled: int) -> Attack:
            forgotten = min(PASSES / size, 0.5)
            attack: Attack = completion(labelled=labelled, iterations=size, decay=1 - forgotten)
            return attack

        if least > FEW:
            every = partial(sized, labelled=least)
            yield LabelMember("model_completion, all labels", every, self.iterations, rows=True)
        yield LabelMember("model_completion", partial(sized, labelled=FEW), self.iterations, rows=True)


class LabelTrials:
    """Trials of members on one view: all attempts, the members left out, and the choice."""

    def __init__(self, view: View, knowledge: Knowledge, known: KnownVictims, seed: int, validation: float) -> None:
        self._view, self._knowledge, self._known = view, knowledge, known
        self._seed, self._validation = seed, validation
        self.found: dict[str, _Found] = {}
        self.tried: list[Attempt] = []
        self.left_out: list[LeftOut] = []

    @property
    def chosen(self) -> str:
        """Name of the chosen member: that with the least error, or the first member if no rows test them.

        Ties are decided as the head of this module states.
        """
        if not self._known.judges:
            return next(iter(self.found))
        least = min(found.error for found in self.found.values())
        # Of no error at all there is no deviation to be seen: that of the error of who may be behind by chance counts.
        within = {n: found.error - least <= self._known.deviation(found.error) for n, found in self.found.items()}
        fusing = (n for n, found in self.found.items() if found.member.fuses and within[n])
        equal = {n: self._judged(n) for n, found in self.found.items() if found.error <= least + ROUNDING}
        return next(fusing, None) or most_agreed(equal)

    @property
    def selection(self) -> Selection:
        """Record of the selection."""
        criterion = KNOWN if self._known.judges else IN_ORDER
        return Selection(self.chosen, tuple(self.tried), self._known.metric, tuple(self.left_out), criterion)

    def run(self, member: LabelMember, doublings: int, progress: Progress) -> None:
        """Try a member, doubling its work as long as that gains .01; record why if it does not take part."""
        try:
            attack = member.attack(member.size)
            if missing := self._knowledge.missing(attack.requires | member.needs, self._view):
                raise InvalidInput(f"this run does not grant {', '.join(missing)}")
            best = self._double(member, doublings if member.size else 0, progress)
        except InvalidInput as refused:
            self.left_out.append(LeftOut(member.name, str(refused)))
        else:
            self.found[member.name] = best

    def attack(self, name: str) -> Attack:
        """Return the attack by which the member `name` makes its prediction."""
        _, member, size, _ = self.found[name]
        return member.attack(size)

    def predict(self, name: str) -> Tensor:
        """Return the scores of the victims by the member `name`, trained on all known labels.

        A single score is shifted so that zero separates the known victims best.
        """
        _, member, size, _ = self.found[name]
        judged = self._judged(name)
        if not self._known.judges:
            return judged
        scores = self._predict(member, size, self._knowledge, "all") if member.learns else judged
        return scores if scores.dim() == 2 else scores.double() - self._known.threshold(judged)

    def _judged(self, name: str) -> Tensor:
        """Return the scores of the victims by the member `name` in its test, with clusters assigned to classes."""
        found = self.found[name]
        return name_clusters(found.scores, self._knowledge.hints) if found.member.named else found.scores

    def _double(self, member: LabelMember, doublings: int, progress: Progress) -> _Found:
        found: list[_Found] = []

        def attempt(size: int) -> float:
            started = time.perf_counter()
            error, scores = self._attempt(member, size, progress)
            if not bool(torch.isfinite(scores).all()):
                raise InvalidInput(f"its scores are not finite with {size} steps")
            self.tried.append(Attempt(member.name, size, time.perf_counter() - started, error))
            found.append(_Found(error, member, size, scores))
            return error

        double_work(self._known.metric, member.size, doublings, attempt)
        return min(found, key=lambda one: one.error)

    def _attempt(self, member: LabelMember, size: int, progress: Progress) -> tuple[float, Tensor]:
        """Return the member's error on rows it has not learnt from (NaN without such rows), and all its scores."""
        if member.rows:
            return self._attempt_with_auxiliary_rows(member, size, progress)
        if not self._known.judges:
            return math.nan, self._predict(member, size, self._knowledge, "all", progress)
        if member.learns:
            scores = self._known.cross_predict(
                lambda hints: self._predict(member, size, replace(self._knowledge, hints=hints), "fold", progress)
            )
            return self._known.error(scores), scores
        scores = self._predict(member, size, self._knowledge, "all", progress)
        judged = self._known.cross_predict(partial(name_clusters, scores)) if member.named else scores
        return self._known.error(judged), scores

    def _attempt_with_auxiliary_rows(self, member: LabelMember, size: int, progress: Progress) -> tuple[float, Tensor]:
        """Return the same as `_attempt`, with held-out labelled auxiliary rows appended to the victims."""
        labels = unwrap(self._knowledge.auxiliary_labels).long()
        drawn = torch.Generator().manual_seed(derive(self._seed, "validation"))
        kept = _share_of_each(labels.cpu(), self._validation, drawn)
        left = torch.ones(len(labels), dtype=torch.bool)
        left[kept] = False
        own, beside = unwrap(self._knowledge.own), unwrap(self._knowledge.own_auxiliary)
        known = replace(
            self._knowledge,
            own={name: torch.cat([rows, beside[name][kept]]) for name, rows in own.items()},
            own_auxiliary={name: rows[left] for name, rows in beside.items()},
            auxiliary_labels=labels[left],
        )
        both = self._predict(member, size, known, "validation", progress)
        judge = self._known.extended(labels[kept].cpu(), len(both) - len(kept))
        return (judge.error(both) if judge.least else math.nan), both[: len(both) - len(kept)]

    def _predict(
        self, member: LabelMember, size: int, knowledge: Knowledge, purpose: str, progress: Progress | None = None
    ) -> Tensor:
        # Every attempt draws its own random numbers, so that one more of them changes none of the others.
        drawn = torch.Generator().manual_seed(derive(self._seed, "member", member.name, size, purpose))
        scores = member.attack(size)(self._view, knowledge, drawn, progress).prediction
        return -scores if member.turned else scores


def _fix(progress: Progress, done: int, total: int) -> Progress:
    """Return a progress callback that reports `done` of `total`, whatever arguments it is called with."""
    return lambda own, its_total: progress(done, total)


def _member(
    attack: str,
    size: int = 0,
    *,
    name: str = "",
    needs: Needs | None = None,
    learns: bool = False,
    named: bool = False,
    turned: bool = False,
    fuses: bool = False,
    **parameters: Any,
) -> LabelMember:
    """Return the registered `attack` as a member named `name`, with its `iterations` as the size of its work."""
    kind = load("attacks", attack)

    def sized(size: int) -> Attack:
        made: Attack = kind(**parameters, **({"iterations": size} if size else {}))
        return made

    return LabelMember(
        name or attack, sized, size, frozenset({needs} if needs else ()), learns, named, turned, fuses=fuses
    )


def _share_of_each(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return the positions of a random `share` of the rows of each class, rounded down: (count,)."""
    drawn = []
    for number in labels.unique().tolist():
        rows = (labels == number).nonzero()[:, 0]
        drawn.append(rows[torch.randperm(len(rows), generator=generator)[: math.floor(share * len(rows))]])
    return torch.cat(drawn)
