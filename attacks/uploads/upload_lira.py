"""LiRA on uploads: the likelihood ratio of a row's confidence under copies of the client with the row and without it.

Paper: after Carlini, Chien, Nasr, Song, Terzis, Tramèr, "Membership inference attacks from first principles", IEEE S&P
2022 (algorithm 1 online, section V-B offline; one variance for all rows where copies are few); Nasr, Shokri,
Houmansadr, "Comprehensive privacy analysis of deep learning", IEEE S&P 2019 (a passive aggregation server that holds
every round's model).

The adversary is the aggregation server of a run that was recorded, with candidate rows and their labels. For each of
the newest `rounds` it trains `copies` clients of its own from the weights that the client was sent, as the protocol
says that the client trains (`client_copies` says what is left out), each on as many rows as the client has. Online:
half of the candidates, in complementary pairs, so that each is in exactly half of the copies, and auxiliary rows of the
candidates' classes where the client has more. Offline: such auxiliary rows alone, half of them at most, with as many
passes over them. The confidence of a row is log(p / (1 - p)) of its label by what came back; the score of a round is
log N(seen; in) - log N(seen; out), offline how many deviations it lies above the copies'. Rounds are added up, as log
likelihoods are: given the weights that were sent and the client's rows, what came back depends on that round's order of
batches alone.

A row counts as one that every round trains on. Where a round takes some of a client's rows and these are fewer than
half of the candidates, a copy has that half, and so many more steps. The server needs to know only the exchanged
weights and the protocol. If clients send scores of public rows instead, no copy can start from the client's weights,
and the attack is refused: use `upload_membership`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import (
    Attack,
    Budgets,
    DefenseEffect,
    Knowledge,
    Needs,
    Phase,
    Progress,
    Target,
    check_classes,
    unwrap,
)
from splitfed.attacks.membership.confidence import margins, membership_score
from splitfed.attacks.membership.copied_models import require_copies
from splitfed.attacks.uploads.client_copies import ClientCopies
from splitfed.attacks.uploads.uploaded_models import ModelReader
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.messages import WEIGHT_GRADIENT, View

LEAST_SPARE = 4
"""Minimum number of auxiliary rows, at which random halves differ."""


@dataclass(frozen=True)
class UploadLira(Attack):
    """Predicts membership by the likelihood ratio of a row's confidence over imitated clients with and without the row.

    `copies`: imitated clients for each of the newest `rounds`, or of all recorded rounds if these are fewer. `online`:
    whether the copies train on candidates too. `pooled`: whether all candidates share one variance, which is better
    with fewer than 64 copies.
    """

    target: ClassVar[Target] = Target.MEMBERS
    phase: ClassVar[Phase] = Phase.TRAINING
    reads: ClassVar[tuple[str, ...]] = ("weights", "update", WEIGHT_GRADIENT)
    requires: ClassVar[frozenset[Needs]] = frozenset(
        {Needs.UPLOADS, Needs.CANDIDATES, Needs.EXCHANGED_MODEL, Needs.UPDATES}
    )
    adapts_to = frozenset[DefenseEffect]()
    budgets: ClassVar[Budgets] = {
        "quick": {"copies": 16, "rounds": 3, "pooled": True},
        "full": {"copies": 256, "rounds": 10, "pooled": False},
    }

    copies: int = field(default=16, metadata=require_copies("upload_lira copies"))
    rounds: int = field(default=3, metadata=require_count("upload_lira rounds", low=1))
    online: bool = True
    pooled: bool = True

    @property
    def uses(self) -> frozenset[Needs]:
        """Auxiliary rows for the copies, and for a head if features are exchanged."""
        return frozenset({Needs.AUXILIARY, Needs.AUXILIARY_LABELS})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the sum over rounds of every candidate's score: (candidates,)."""
        classes = check_classes("upload_lira", knowledge.classes)
        x, y = unwrap(knowledge.candidates), unwrap(knowledge.candidate_labels)
        exchanged, local = unwrap(knowledge.exchanged), unwrap(knowledge.local)
        clients = ClientCopies("upload_lira", exchanged, local, classes)
        reader = ModelReader("upload_lira", exchanged, knowledge)
        spare_x, spare_y = self._spare_rows(knowledge)
        every_x, every_y = torch.cat([x, spare_x]), torch.cat([y, spare_y])
        rounds = exchanged.rounds[-self.rounds :]
        done, total = 0, len(rounds) * self.copies
        progress(0, total)
        score = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for one in rounds:
            held, confidences = torch.zeros(self.copies, len(x), dtype=torch.bool), list[Tensor]()
            if self.online:
                held = complementary_halves(self.copies, len(x), generator)
            for candidates in held:
                mine = self._rows_of_copy(candidates, len(spare_x), local.rows, generator).to(x.device)
                after = clients.train(one.before, every_x[mine], every_y[mine], generator)
                with torch.no_grad():
                    confidences.append(margins(reader.read(after)(x), y))
                done += 1
                progress(done, total)
            with torch.no_grad():
                seen = margins(reader.read(one.after)(x), y)
            confidence = torch.stack(confidences)
            if not bool(torch.isfinite(confidence).all()):
                raise InvalidInput("upload_lira: a copy of the client diverged; its local training cannot be imitated")
            score += membership_score(seen, confidence, held.to(x.device), self.online, self.pooled)
        return score

    def _spare_rows(self, knowledge: Knowledge) -> tuple[Tensor, Tensor]:
        """Return the auxiliary rows of the candidates' classes, and their labels.

        Raises `InvalidInput` offline without any.
        """
        x, y = unwrap(knowledge.candidates), unwrap(knowledge.candidate_labels)
        rows, labels = knowledge.auxiliary, knowledge.auxiliary_labels
        if rows is None or labels is None:
            rows, labels = x[:0], y[:0]
        alike = torch.isin(labels.view(-1), y.view(-1))
        if not self.online and int(alike.sum()) < LEAST_SPARE:
            raise InvalidInput(
                "upload_lira with online=False trains copies on halves of the auxiliary rows of the candidates' "
                f"classes: {LEAST_SPARE} or more with labels; found {int(alike.sum())}"
            )
        return rows[alike], labels[alike]

    def _rows_of_copy(self, held: Tensor, spare: int, rows: int | None, generator: torch.Generator) -> Tensor:
        """Return a copy's row positions among the candidates and, after these, `spare` auxiliary rows: (k,) int64.

        `rows`: number of the client's rows. If it is unknown, and offline, at most half of the available rows are
        drawn, as copies would otherwise be too similar.
        """
        own, half = held.nonzero().flatten(), (spare + (len(held) if self.online else 0)) // 2
        wanted = half if rows is None else rows if self.online else min(rows, half)
        drawn = torch.randperm(spare, generator=generator)[: max(wanted - len(own), 0)]
        return torch.cat([own, len(held) + drawn])


def complementary_halves(copies: int, rows: int, generator: torch.Generator) -> Tensor:
    """Return a (copies, rows) bool matrix: random halves of the rows, each followed by its complement."""
    held = torch.zeros(copies, rows, dtype=torch.bool)
    for copy in range(0, copies, 2):
        held[copy, torch.randperm(rows, generator=generator)[: rows // 2]] = True
        held[copy + 1] = ~held[copy]
    return held
