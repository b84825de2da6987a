"""Own features: a logistic regression from the adversary's own data to the labels it knows.

Paper: none; after Fu, Zhang, Ji, Chen, Wu, Guo, Zhou, Liu, Wang, "Label inference attacks against vertical federated
learning", USENIX Security 2022, whose adversary has columns of its own and a few labels. It reads its own columns and
the outputs of its own segment on them, and no message. So it is the floor of every attack on labels
(`splitfed.threats.floors`): an attack that scores no higher has learnt nothing from the other parties. Columns are
scaled to deviation 1 over the adversary's rows. Known labels are those of known victims (`hints`), and those of
auxiliary rows where granted. A segment trained with the others contains information from their gradients on training
rows; here that counts as the adversary's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import IN_TRAINING, Knowledge, Needs, Phase, Progress
from splitfed.attacks.labels.label_attack import LabelAttack
from splitfed.attacks.labels.logistic_regression import fit_logistic
from splitfed.attacks.labels.own_data import own_rows, victims_of
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class OwnFeatures(LabelAttack):
    """Predicts classes by a logistic regression on the party's own features.

    `hints`: known victims of each class (0: auxiliary rows alone); `penalty`: factor of half the squared weights.
    """

    phase: ClassVar[Phase] = Phase.INFERENCE
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.OWN_INPUTS})
    uses: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY_LABELS})
    adapts_to = IN_TRAINING

    hints: int = field(default=6, metadata=require_count("own_features hints"))
    penalty: float = field(default=1.0, metadata=require_number("own_features penalty", low=0.0))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the log probability of each class for each victim: (victims, classes)."""
        rows, labels, known = own_rows("own_features", view, knowledge)
        return fit_logistic(rows[known], labels, self.penalty)(rows[: victims_of(knowledge)])
