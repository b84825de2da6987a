"""Own features: a logistic regression from what the adversary holds itself to the labels that it knows.

Paper: none; after Fu, Zhang, Ji, Chen, Wu, Guo, Zhou, Liu, Wang, "Label inference attacks against vertical federated
learning", USENIX Security 2022, whose adversary has columns of its own and a few labels.

It reads its own columns and what its own segment makes of them, and nothing that it received. So it is the floor of
every attack on labels (`splitfed.threats.floors`): an attack that finds no more has learnt nothing from the others.
All columns are brought to deviation 1 over the rows that the adversary has. Known labels are those of known victims
(`hints`), and those of auxiliary rows where these are granted.

A segment that was trained with the others holds what their gradients have taught it, of the rows of training: that
counts as the adversary's own here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import IN_TRAINING, Attack, Budgets, Knowledge, Needs, Progress, Target
from splitfed.attacks.labels.label_attack import known_of_each
from splitfed.attacks.labels.logistic_regression import fit_logistic
from splitfed.attacks.labels.own_columns import own_rows, victims_of
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class OwnFeatures(Attack):
    """Classes by a logistic regression on what the party holds itself.

    `hints`: known victims of each class (0: auxiliary rows alone); `penalty`: of half the squared weights.
    """

    target: ClassVar[Target] = Target.LABELS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.OWN_INPUTS})
    uses: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY_LABELS})
    adapts_to = IN_TRAINING
    budgets: ClassVar[Budgets] = {"fast": {"hints": 6}, "paper": {"hints": 6}}

    hints: int = field(default=6, metadata=require_count("own_features hints"))
    penalty: float = field(default=1.0, metadata=require_number("own_features penalty", low=0.0))

    def asks(self, classes: int | None) -> dict[int, int]:
        """Victims of every class, as many as `hints` each."""
        return known_of_each("own_features", classes, self.hints)

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the log probability of each class for each victim: (victims, classes)."""
        rows, labels, known = own_rows("own_features", view, knowledge)
        return fit_logistic(rows[known], labels, self.penalty)(rows[: victims_of(knowledge)])
