"""Membership by loss: a row is the more likely a member, the smaller the model's loss on it.

Paper: Yeom, Giacomelli, Fredrikson, Jha, "Privacy risk in machine learning: analyzing the connection to
overfitting", CSF 2018 (adversary 2, by the loss).

The adversary holds candidate rows with their labels and asks the whole trained model, as a black box through its
parties and their defenses, for its outputs. The authors say "member" below the average training loss; we return
minus the loss and leave the threshold to the ROC.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs, Progress, Target, unwrap
from splitfed.attacks.membership.confidence import check_classes, losses
from splitfed.core.errors import require_count
from splitfed.core.messages import View


@dataclass(frozen=True)
class MembershipThreshold(Attack):
    """`queries`: how often the model is asked; the losses are averaged, which helps where defenses are random."""

    target = Target.MEMBERS
    requires = frozenset({Needs.CANDIDATES, Needs.PREDICTIONS})

    queries: int = field(default=1, metadata=require_count("membership_threshold queries", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return minus the mean loss of every candidate: (candidates,)."""
        x, y = unwrap(knowledge.candidates), unwrap(knowledge.candidate_labels)
        check_classes("membership_threshold", knowledge.classes)
        asked = [unwrap(knowledge.predict)(x) for _ in range(self.queries)]
        return -torch.stack([losses(outputs, y) for outputs in asked]).mean(0)
