"""Membership by loss: a row is the more likely a member, the smaller the model's loss on it.

Paper: Yeom, Giacomelli, Fredrikson, Jha, "Privacy risk in machine learning: analyzing the connection to
overfitting", CSF 2018 (adversary 2, by the loss).

The adversary holds candidate rows with their labels and asks the whole trained model, as a black box through its
parties and their defenses, for its outputs. The authors say "member" below the average training loss; we return
minus the loss and leave the threshold to the ROC. It adapts to random defenses of releases: the model is asked several
times, which draws them afresh, and the losses are averaged; where nothing is drawn, two answers end it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, DefenseEffect, Knowledge, Needs, Progress, Target, unwrap
from splitfed.attacks.membership.confidence import check_classes, losses
from splitfed.core.errors import require_count
from splitfed.core.messages import View


@dataclass(frozen=True)
class MembershipThreshold(Attack):
    """Members by a threshold on the loss of the model's answer.

    `queries`: how often the model is asked, where its answers differ; the losses are averaged.
    """

    target = Target.MEMBERS
    requires = frozenset({Needs.CANDIDATES, Needs.PREDICTIONS})

    queries: int = field(default=10, metadata=require_count("membership_threshold queries", low=1))

    @property
    def adapts_to(self) -> frozenset[DefenseEffect]:
        """Releases, where one answer is not all that it asks for."""
        return frozenset({DefenseEffect.RELEASE}) if self.queries > 1 else frozenset()

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return minus the mean loss of every candidate: (candidates,)."""
        x, y = unwrap(knowledge.candidates), unwrap(knowledge.candidate_labels)
        check_classes("membership_threshold", knowledge.classes)
        answers = query_answers(lambda: unwrap(knowledge.predict)(x), self.queries)
        return -torch.stack([losses(outputs, y) for outputs in answers]).mean(0)


def query_answers(ask: Callable[[], Tensor], count: int) -> list[Tensor]:
    """Return `count` answers of `ask`; one alone where the first two are the same, for then nothing is drawn."""
    answers = [ask()]
    while len(answers) < count:
        answers.append(ask())
        if len(answers) == 2 and torch.equal(*answers):
            return answers[:1]
    return answers
