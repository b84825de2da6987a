"""Strongest membership attack: the best of this project's membership attacks, chosen on imitated runs.

Paper: none; after Shokri, Stronati, Song, Shmatikov, "Membership inference attacks against machine learning models",
IEEE S&P 2017, for a shadow run in which the adversary knows the members; here such runs are used to choose an attack.

Its members are `membership_threshold`, `membership_shadow` and `lira`, online and offline.

The adversary imitates the run on some of its auxiliary rows, whose membership it knows, and attacks the imitation with
every member. The attack with the greatest mean AUC over `worlds` imitations is then applied to the run itself; no
candidate is used in the choice. The copies that a member trains are doubled until a doubling gains less than .01 of AUC
or `doublings` is reached; `Selection.converged` states which.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.base import (
    IN_TRAINING,
    Attack,
    Budgets,
    Knowledge,
    Needs,
    Outcome,
    Progress,
    Target,
    check_classes,
    unwrap,
)
from splitfed.attacks.budgets import double_work
from splitfed.attacks.membership.copied_models import Copies, copies_work, require_copies
from splitfed.attacks.scoring.label_metrics import auc
from splitfed.attacks.selection import Attempt, Selection
from splitfed.attacks.work import OneOf, Work
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.messages import View
from splitfed.core.random import derive
from splitfed.registry import load

LEAST_ROWS = 16
"""Minimum number of auxiliary rows, a quarter of which forms each part of an imitated run."""
QUICK = {"copies": 4, "doublings": 1, "worlds": 1}
STANDARD = {"copies": 8, "doublings": 2, "worlds": 2}
FULL = {"copies": 16, "doublings": 4, "worlds": 4}


class ShadowRun(NamedTuple):
    """An imitated run: its view and knowledge, and which of its candidates it was trained on, (candidates,) bool."""

    knowledge: Knowledge
    members: Tensor


class MembershipMember(NamedTuple):
    """A candidate attack: its `name`, the `attack` for a number of copies, and the first such number (0: no copies)."""

    name: str
    attack: Callable[[int], Attack]
    size: int = 0


@dataclass(frozen=True)
class StrongestMembership(Attack):
    """The best of several membership attacks, chosen on `worlds` imitated runs.

    Attacks have `copies` of the model at first, doubled at most `doublings` times. `epochs` and `batch_size` of copies
    and imitated runs; None: as the run.
    """

    target: ClassVar[Target] = Target.MEMBERS
    requires: ClassVar[frozenset[Needs]] = frozenset(
        {Needs.CANDIDATES, Needs.PREDICTIONS, Needs.IMITATION, Needs.AUXILIARY, Needs.AUXILIARY_LABELS}
    )
    adapts_to = IN_TRAINING
    budgets: ClassVar[Budgets] = {"quick": QUICK, "standard": STANDARD, "full": FULL}

    copies: int = field(default=8, metadata=require_copies("strongest_membership copies"))
    doublings: int = field(default=2, metadata=require_count("strongest_membership doublings", low=1))
    worlds: int = field(default=2, metadata=require_count("strongest_membership worlds", low=1))
    epochs: int | None = field(default=None, metadata=require_count("strongest_membership epochs", low=1))
    batch_size: int | None = field(default=None, metadata=require_count("strongest_membership batch_size", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Outcome:
        """Return the chosen attack's score of every candidate, (candidates,), and the selection."""
        check_classes("strongest_membership", knowledge.classes)
        worlds = [self._imitate(knowledge, generator) for _ in range(self.worlds)]
        members = self._members()
        most, tried, attacks = 1 + (len(members) - 1) * (1 + self.doublings), list[Attempt](), list[Attack]()

        def attempt(member: MembershipMember, size: int) -> float:
            attack, started = member.attack(size), time.perf_counter()
            error = self._error(attack, worlds, view, derive(generator.initial_seed(), "member", member.name, size))
            tried.append(Attempt(member.name, size, time.perf_counter() - started, error))
            attacks.append(attack)
            progress(min(len(tried), most - 1), most)
            return error

        for member in members:
            double_work("auc", member.size, self.doublings if member.size else 0, partial(attempt, member))
        best = min(range(len(tried)), key=lambda number: tried[number].error)
        chosen = tried[best].member
        prediction = attacks[best](view, knowledge, generator).prediction
        progress(most, most)
        return Outcome(prediction, selection=Selection(chosen, tuple(tried), "auc", criterion="on imitated runs"))

    def work(self, view: View, knowledge: Knowledge) -> list[Work | OneOf]:
        """Return the work of the attack: imitated runs, the attacks on each, and the chosen attack on the run."""
        rows = len(unwrap(knowledge.auxiliary))
        among, left = 2 * (rows // 4), rows - 3 * (rows // 4)
        tried = [
            [self.copies * 2**doubling for doubling in range(1 + d)] for d in (min(self.doublings, 1), self.doublings)
        ]
        copies = (self.worlds * sum(tried[0]), self.worlds * sum(tried[1]))
        examples = [[size * left for size in sizes for _ in range(self.worlds)] for sizes in tried]
        # A copy learns from half of what it may: offline attacks from what is left, lira from the candidates too.
        in_worlds = [
            Copies(self.worlds, self.worlds, among, among),
            Copies(*copies, left // 2, left),
            Copies(*copies, (among + left) // 2, among),
            Copies(*copies, left // 2, among),
        ]
        threshold, shadow, lira = (load("attacks", n) for n in ("membership_threshold", "membership_shadow", "lira"))

        def ask(size: int) -> None:
            threshold()(view, knowledge, torch.Generator().manual_seed(0))

        how: dict[str, Any] = {"epochs": self.epochs, "batch_size": self.batch_size}
        longest = tried[1][-1]
        return [
            *copies_work(knowledge, self.epochs, self.batch_size, in_worlds),
            shadow().classifier_work(knowledge, *examples),
            Work(ask, 0, 0, (self.worlds, self.worlds)),
            OneOf(
                (
                    (Work(ask, 0, 0),),
                    tuple(shadow(copies=longest, **how).work(view, knowledge)),
                    tuple(lira(copies=longest, **how).work(view, knowledge)),
                )
            ),
        ]

    def _members(self) -> list[MembershipMember]:
        how: dict[str, Any] = {"epochs": self.epochs, "batch_size": self.batch_size}
        threshold, shadow, lira = (load("attacks", n) for n in ("membership_threshold", "membership_shadow", "lira"))
        return [
            MembershipMember("membership_threshold", lambda copies: threshold()),
            MembershipMember("membership_shadow", lambda copies: shadow(copies=copies, **how), self.copies),
            MembershipMember("lira", lambda copies: lira(copies=copies, **how), self.copies),
            MembershipMember("lira, offline", lambda copies: lira(copies=copies, online=False, **how), self.copies),
        ]

    def _imitate(self, knowledge: Knowledge, generator: torch.Generator) -> ShadowRun:
        """Return a run imitated on half of the auxiliary rows, and attacked with a quarter of them as auxiliary rows.

        Its candidates are half of the rows, one half of which it was trained on.
        """
        x, y = unwrap(knowledge.auxiliary), unwrap(knowledge.auxiliary_labels)
        if len(x) < LEAST_ROWS:
            raise InvalidInput(
                f"strongest_membership needs at least {LEAST_ROWS} auxiliary rows, to imitate the run; found {len(x)}"
            )
        quarter = len(x) // 4
        order = torch.randperm(len(x), generator=generator).to(x.device)
        trained, candidates, left = order[: 2 * quarter], order[quarter : 3 * quarter], order[3 * quarter :]
        seed = int(torch.randint(2**62, (), generator=generator))
        copy = unwrap(knowledge.imitate)(x[trained], y[trained], self.epochs, self.batch_size, seed)
        known = replace(
            knowledge,
            auxiliary=x[left],
            auxiliary_labels=y[left],
            candidates=x[candidates],
            candidate_labels=y[candidates],
            predict=copy.predict,
        )
        return ShadowRun(known, torch.arange(2 * quarter) < quarter)

    def _error(self, attack: Attack, worlds: list[ShadowRun], view: View, seed: int) -> float:
        """Return 1 - AUC of `attack`, the mean over `worlds`."""
        drawn = torch.Generator().manual_seed(seed)
        return 1 - fmean(auc(attack(view, one.knowledge, drawn).prediction, one.members) for one in worlds)
