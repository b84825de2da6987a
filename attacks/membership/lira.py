"""LiRA: the likelihood ratio of a row's confidence under copies trained with it and without it.

Paper: Carlini, Chien, Nasr, Song, Terzis, Tramèr, "Membership inference attacks from first principles", IEEE S&P 2022
(algorithm 1 online, section V-B offline).

The confidence is log(p / (1 - p)) for p the probability of the true label, which is close to Gaussian. Online: every
copy trains on half of the auxiliary rows and candidates, drawn so that each row is in exactly half of the copies; the
score is log N(seen; in) - log N(seen; out). Offline: copies train on auxiliary rows alone, and the score is how many
standard deviations the confidence lies above those of the copies, which orders rows as the authors' one-sided test
does, without rounding to 1. The authors also query augmented versions of a row; here only the row itself is queried.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import (
    IN_TRAINING,
    Attack,
    Budgets,
    Knowledge,
    Needs,
    Progress,
    Target,
    check_classes,
    unwrap,
)
from splitfed.attacks.membership.confidence import margins, membership_score
from splitfed.attacks.membership.copied_models import Copies, copies_work, require_copies
from splitfed.attacks.work import Work
from splitfed.core.errors import require_count
from splitfed.core.messages import View


@dataclass(frozen=True)
class Lira(Attack):
    """Predicts membership by the likelihood ratio of a row's confidence under models trained with and without it.

    `copies`: number of models trained for `epochs` in batches of `batch_size` (None: as the run). `online`: whether the
    copies train on candidates too. `pooled`: whether all candidates share one variance, which is better with fewer than
    64 copies.
    """

    target: ClassVar[Target] = Target.MEMBERS
    requires: ClassVar[frozenset[Needs]] = frozenset(
        {Needs.CANDIDATES, Needs.PREDICTIONS, Needs.IMITATION, Needs.AUXILIARY, Needs.AUXILIARY_LABELS}
    )
    adapts_to = IN_TRAINING
    budgets: ClassVar[Budgets] = {
        "quick": {"copies": 8, "pooled": True},
        "full": {"copies": 256, "pooled": False},
    }

    copies: int = field(default=8, metadata=require_copies("lira copies"))
    online: bool = True
    pooled: bool = True
    epochs: int | None = field(default=None, metadata=require_count("lira epochs", low=1))
    batch_size: int | None = field(default=None, metadata=require_count("lira batch_size", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the score of every candidate: (candidates,)."""
        x, y = unwrap(knowledge.candidates), unwrap(knowledge.candidate_labels)
        check_classes("lira", knowledge.classes)
        confidence, held = self._copies(x, y, knowledge, generator, progress)
        seen = margins(unwrap(knowledge.predict)(x), y)
        return membership_score(seen, confidence, held, self.online, self.pooled)

    def work(self, view: View, knowledge: Knowledge) -> list[Work]:
        """Return the work of the attack: copies of the model, each trained on half of the rows."""
        asked = len(unwrap(knowledge.candidates))
        rows = len(unwrap(knowledge.auxiliary)) + self.online * asked
        copies = Copies(self.copies, self.copies, rows // 2, asked)
        return copies_work(knowledge, self.epochs, self.batch_size, [copies])

    def _copies(
        self, x: Tensor, y: Tensor, knowledge: Knowledge, generator: torch.Generator, progress: Progress
    ) -> tuple[Tensor, Tensor]:
        """Return each copy's confidence in each candidate, and whether it trained on it: (copies, candidates) each."""
        rows, labels = unwrap(knowledge.auxiliary), unwrap(knowledge.auxiliary_labels)
        if self.online:
            rows, labels = torch.cat([x, rows]), torch.cat([y, labels])
        held = halves(self.copies, len(rows), generator)
        confidences = []
        for number, mine in enumerate(held.to(rows.device)):
            seed = int(torch.randint(2**62, (), generator=generator))
            copy = unwrap(knowledge.imitate)(rows[mine], labels[mine], self.epochs, self.batch_size, seed)
            confidences.append(margins(copy.predict(x), y))
            progress(number + 1, self.copies)
        among = held[:, : len(x)] if self.online else torch.zeros(self.copies, len(x), dtype=torch.bool)
        return torch.stack(confidences), among.to(x.device)


def halves(copies: int, rows: int, generator: torch.Generator) -> Tensor:
    """Return a random (copies, rows) bool matrix in which every row is True in exactly half of the copies."""
    return torch.rand(copies, rows, generator=generator).argsort(0).argsort(0) < copies // 2
