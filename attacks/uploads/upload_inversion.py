"""Upload inversion: a row for each class, by descent on the model that a client's uploads show.

Paper: after Fredrikson, Jha, Ristenpart, "Model inversion attacks that exploit confidence information and basic
countermeasures", CCS 2015, with the start and the pull of He, Zhang, Lee, "Model inversion attacks against
collaborative inference", ACSAC 2019, towards rows of the kind in place of their denoising.

The adversary is the aggregation server of a run that was recorded, with auxiliary rows, no labels needed. Its model is
what the client sent back, or a student of the scores that it gave public rows (see `uploaded_models`). For every class
it starts from the mean of the `neighbours` auxiliary rows that this model gives the class most, and descends on minus
the log probability of the class plus `stay` times the mean squared distance from that start. Where only features are
exchanged there is no class to descend on: gradient inversion (`dlg`) reads these. The constants are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Budgets, DefenseEffect, Knowledge, Needs, Phase, Progress, Target, unwrap
from splitfed.attacks.membership.confidence import check_classes
from splitfed.attacks.networks.gradient_descent import take_step
from splitfed.attacks.uploads.uploaded_models import KINDS, SHOWN, StudentSettings, uploaded_models
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class UploadInversion(Attack):
    """Rows of a client's classes, by descent on the model that came back.

    `iterations` of Adam at rate `rate` from the mean of `neighbours` rows; `stay` keeps near it.

    `epochs`, `lr`, `batch_size`: of students.
    """

    target: ClassVar[Target] = Target.REPRESENTATIVES
    phase: ClassVar[Phase] = Phase.TRAINING
    reads: ClassVar[tuple[str, ...]] = KINDS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.UPLOADS, Needs.AUXILIARY})
    adapts_to = frozenset[DefenseEffect]()
    budgets: ClassVar[Budgets] = {"fast": {"iterations": 100}, "paper": {"iterations": 1000}}

    iterations: int = field(default=100, metadata=require_count("upload_inversion iterations", low=1))
    rate: float = field(default=0.02, metadata=require_number("upload_inversion rate", low=0.0, open_low=True))
    neighbours: int = field(default=20, metadata=require_count("upload_inversion neighbours", low=1))
    stay: float = field(default=100.0, metadata=require_number("upload_inversion stay", low=0.0))
    epochs: int = field(default=100, metadata=require_count("upload_inversion epochs", low=1))
    lr: float = field(default=3e-3, metadata=require_number("upload_inversion lr", low=0.0, open_low=True))
    batch_size: int = field(default=32, metadata=require_count("upload_inversion batch_size", low=2))

    @property
    def uses(self) -> frozenset[Needs]:
        """What shows a model, whichever the run has."""
        return SHOWN - {Needs.AUXILIARY_LABELS}

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return (classes, *shape)."""
        classes = check_classes("upload_inversion", knowledge.classes)
        if knowledge.exchanged is not None and not knowledge.exchanged.scores:
            raise InvalidInput(
                f"upload_inversion descends on scores of classes; what is exchanged ends in the features "
                f"{knowledge.exchanged.out!r}: take Dlg"
            )
        settings = StudentSettings(self.epochs, self.lr, self.batch_size)
        model = uploaded_models("upload_inversion", knowledge, settings, generator, progress, 1)[-1].after
        known = unwrap(knowledge.auxiliary)
        with torch.no_grad():
            given = model(known)
        nearest = given.topk(min(self.neighbours, len(known)), dim=0).indices
        start = torch.stack([known[nearest[:, label]].mean(0) for label in range(classes)])
        low, high = knowledge.value_range or (-torch.inf, torch.inf)
        x = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([x], lr=self.rate)
        for iteration in range(self.iterations):
            progress(iteration, self.iterations)
            misfit = -model(x).diagonal().sum()
            take_step(optimizer, misfit + self.stay * (x - start).square().flatten(1).mean(1).sum())
            with torch.no_grad():
                x.clamp_(low, high)
        return x.detach()
