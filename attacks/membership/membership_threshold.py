"""Membership by loss: the smaller the model's loss on a row, the more likely the row is a member.

Paper: Yeom, Giacomelli, Fredrikson, Jha, "Privacy risk in machine learning: analyzing the connection to overfitting",
CSF 2018 (adversary 2, by the loss). The adversary holds candidate rows with their labels and queries the whole trained
model, as a black box through its parties and their defenses. The authors predict "member" below the average training
loss; here the score is the negated loss, and the ROC covers all thresholds. The attack adapts to random defenses of
releases: it queries several times, with fresh draws, and averages the losses; if the first two answers are equal,
nothing is random and it stops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, DefenseEffect, Knowledge, Needs, Progress, Target, check_classes, unwrap
from splitfed.attacks.membership.confidence import losses
from splitfed.attacks.networks.query_passes import query_passes
from splitfed.core.errors import require_count
from splitfed.core.messages import View


@dataclass(frozen=True)
class MembershipThreshold(Attack):
    """Predicts membership by the negated loss of the model's output.

    `queries`: number of queries if the outputs are random; the losses are averaged.
    """

    target = Target.MEMBERS
    requires = frozenset({Needs.CANDIDATES, Needs.PREDICTIONS})

    queries: int = field(default=10, metadata=require_count("membership_threshold queries", low=1))

    @property
    def adapts_to(self) -> frozenset[DefenseEffect]:
        """Effects on releases, if there is more than one query."""
        return frozenset({DefenseEffect.RELEASE}) if self.queries > 1 else frozenset()

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return minus the mean loss of every candidate: (candidates,)."""
        x, y = unwrap(knowledge.candidates), unwrap(knowledge.candidate_labels)
        check_classes("membership_threshold", knowledge.classes)
        predict = unwrap(knowledge.predict)
        answers = query_passes(lambda rows: {"outputs": predict(rows)}, x, self.queries)
        return -torch.stack([losses(answer["outputs"], y) for answer in answers]).mean(0)
