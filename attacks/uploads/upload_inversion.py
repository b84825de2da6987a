"""Upload inversion: optimizes a row for each class under the model that a client's uploads reveal.

Paper: after Fredrikson, Jha, Ristenpart, "Model inversion attacks that exploit confidence information and basic
countermeasures", CCS 2015, with a prior towards auxiliary rows, after He, Zhang, Lee, "Model inversion attacks against
collaborative inference", ACSAC 2019, instead of their denoising.

The adversary is the aggregation server of a run that was recorded, with auxiliary rows, no labels needed. Its model is
the one that the client returned, or a student of its scores of public rows (see `uploaded_models`). For every class it
starts from the mean of the `neighbours` auxiliary rows with the greatest probability of the class under this model, and
minimises minus the log probability of the class plus `stay` times the mean squared distance from that start. If only
features are exchanged, there are no class scores: use gradient inversion (`dlg`). The constants are ours.
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
from splitfed.attacks.uploads.upload_attack import descend_within
from splitfed.attacks.uploads.uploaded_models import KINDS, SHOWN, uploaded_models
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class UploadInversion(Attack):
    """Optimizes rows of a client's classes by `iterations` of Adam at rate `rate` from the mean of `neighbours` rows.

    `stay`: weight of the distance from that start. `epochs`, `lr`, `batch_size`: of students.
    """

    target: ClassVar[Target] = Target.REPRESENTATIVES
    phase: ClassVar[Phase] = Phase.TRAINING
    reads: ClassVar[tuple[str, ...]] = KINDS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.UPLOADS, Needs.AUXILIARY})
    adapts_to = frozenset[DefenseEffect]()
    budgets: ClassVar[Budgets] = {"quick": {"iterations": 100}, "full": {"iterations": 1000}}

    iterations: int = field(default=100, metadata=require_count("upload_inversion iterations", low=1))
    rate: float = field(default=0.02, metadata=require_number("upload_inversion rate", low=0.0, open_low=True))
    neighbours: int = field(default=20, metadata=require_count("upload_inversion neighbours", low=1))
    stay: float = field(default=100.0, metadata=require_number("upload_inversion stay", low=0.0))
    epochs: int = field(default=100, metadata=require_count("upload_inversion epochs", low=1))
    lr: float = field(default=3e-3, metadata=require_number("upload_inversion lr", low=0.0, open_low=True))
    batch_size: int = field(default=32, metadata=require_count("upload_inversion batch_size", low=2))

    @property
    def uses(self) -> frozenset[Needs]:
        """Uploads that reveal a model, whichever the run has."""
        return SHOWN - {Needs.AUXILIARY_LABELS}

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return one row for each class: (classes, *shape)."""
        classes = check_classes("upload_inversion", knowledge.classes)
        if knowledge.exchanged is not None and not knowledge.exchanged.scores:
            raise InvalidInput(
                f"upload_inversion needs scores of classes; the exchanged model ends in the features "
                f"{knowledge.exchanged.out!r}; dlg needs none, where an update is the gradient of one step"
            )
        (pair,) = uploaded_models(
            "upload_inversion", knowledge, generator, progress, 1,
            epochs=self.epochs, lr=self.lr, batch_size=self.batch_size,
        )  # fmt: skip
        model = pair.after
        known = unwrap(knowledge.auxiliary)
        with torch.no_grad():
            given = model(known)
        nearest = given.topk(min(self.neighbours, len(known)), dim=0).indices
        start = torch.stack([known[nearest[:, label]].mean(0) for label in range(classes)])

        def loss(x: Tensor) -> Tensor:
            return -model(x).diagonal().sum() + self.stay * (x - start).square().flatten(1).mean(1).sum()

        return descend_within(start, loss, knowledge.value_range, self.iterations, self.rate, progress)
