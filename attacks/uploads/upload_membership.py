"""Upload membership: scores a row by how much a client's upload raised the confidence in it.

Paper: after Watson, Guo, Cormode, Sablayrolles, "On the importance of difficulty calibration in membership inference
attacks", ICLR 2022 (a row's score minus that of a model which has not seen it); Nasr, Shokri, Houmansadr,
"Comprehensive privacy analysis of deep learning", IEEE S&P 2019 (a passive aggregation server that holds every round's
model); Jagielski, Nasr, Choquette-Choo, Lee, Carlini, "Students parrot their teachers: membership inference on model
distillation", NeurIPS 2023 (a teacher's rows through a student).

The adversary is the aggregation server of a run that was recorded, with candidate rows and their labels. Where weights,
changes of them or gradients are exchanged (a meme, a mentee, an adapter, an average), the score of a row is the log
odds of its label by what the client sent back, minus those by what it was sent, the mean over `rounds` of them. Where
clients score public rows, the two models are a student of the client's scores and one of all others'. These share no
weights, so the second one's log odds are subtracted with a factor, the slope of the least-squares line of the first's
over the candidates, from 0 to 1 (ours; Watson et al. take 1). Features end in a head of the adversary's own (see
`uploaded_models`). With `calibrated=False` only the first is used.
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
from splitfed.attacks.membership.confidence import margins
from splitfed.attacks.uploads.uploaded_models import KINDS, SHOWN, ModelPair, uploaded_models
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class UploadMembership(Attack):
    """Predicts membership by how much better the client's upload fits a row than the server's model before it.

    `rounds`: number of newest rounds that count (None: all recorded ones). `epochs`, `lr`, `batch_size`: of students.
    """

    target: ClassVar[Target] = Target.MEMBERS
    phase: ClassVar[Phase] = Phase.TRAINING
    reads: ClassVar[tuple[str, ...]] = KINDS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.UPLOADS, Needs.CANDIDATES})
    adapts_to = frozenset[DefenseEffect]()
    budgets: ClassVar[Budgets] = {"quick": {"epochs": 100}, "full": {"epochs": 400}}

    rounds: int | None = field(default=None, metadata=require_count("upload_membership rounds", low=1))
    calibrated: bool = True
    epochs: int = field(default=100, metadata=require_count("upload_membership epochs", low=1))
    lr: float = field(default=3e-3, metadata=require_number("upload_membership lr", low=0.0, open_low=True))
    batch_size: int = field(default=32, metadata=require_count("upload_membership batch_size", low=2))

    @property
    def uses(self) -> frozenset[Needs]:
        """Uploads that reveal a model, whichever the run has."""
        return SHOWN

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the calibrated log odds of every candidate's label: (candidates,)."""
        check_classes("upload_membership", knowledge.classes)
        x, y = unwrap(knowledge.candidates), unwrap(knowledge.candidate_labels)
        pairs = uploaded_models(
            "upload_membership", knowledge, generator, progress, self.rounds,
            epochs=self.epochs, lr=self.lr, batch_size=self.batch_size,
        )  # fmt: skip

        @torch.no_grad()
        def score(pair: ModelPair) -> Tensor:
            after = margins(pair.after(x), y)
            if not self.calibrated:
                return after
            before = margins(pair.before(x), y)
            # What came back is what was sent, trained; students have nothing in common but what their rows say.
            return after - before if knowledge.exchanged is not None else after - slope(after, before) * before

        return torch.stack([score(pair) for pair in pairs]).mean(0)


def slope(values: Tensor, on: Tensor) -> Tensor:
    """Return the slope of the least-squares line of `values` (n,) over `on` (n,), clamped to [0, 1].

    0 for constant `on`.
    """
    away = on - on.mean()
    found = torch.dot(values - values.mean(), away) / away.square().sum().clamp_min(torch.finfo(on.dtype).tiny)
    return found.clamp(0, 1)
