"""Prototype inversion: optimizes rows near auxiliary ones until their embedding is the class mean that a client sent.

Paper: after He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (rMLE: search an
input whose release fits), applied to class means; Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated
prototype learning across heterogeneous clients", AAAI 2022, considers such means irreversible without the model.

The adversary is the aggregation server of a run that was recorded, with auxiliary rows, no labels, and the weights of
the client's extractor: it has them if weights are sent as well, or from another party with the same weights. For every
class it starts from the mean of the `neighbours` auxiliary rows whose embeddings lie nearest to what was sent, and
descends on the squared distance of the embedding, relative to the mean's own length, plus `stay` times the mean squared
distance from that start. Classes that were not sent get the mean of the auxiliary rows. The constants are ours, chosen
on 8x8 digits.
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
    DefenseEffect,
    Knowledge,
    Needs,
    Phase,
    Progress,
    Target,
    check_classes,
    unwrap,
)
from splitfed.attacks.uploads.upload_attack import descend_within, goals
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class PrototypeInversion(Attack):
    """Optimizes rows by `iterations` of Adam at rate `lr` from the mean of `neighbours` auxiliary rows.

    `stay`: weight, >= 0, of the distance from that start.
    """

    target: ClassVar[Target] = Target.REPRESENTATIVES
    phase: ClassVar[Phase] = Phase.TRAINING
    reads: ClassVar[tuple[str, ...]] = ("prototype", "soft labels")
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.UPLOADS, Needs.EXTRACTOR, Needs.AUXILIARY})
    adapts_to = IN_TRAINING - {DefenseEffect.LABELS}
    budgets: ClassVar[Budgets] = {"quick": {"iterations": 100}, "full": {"iterations": 1000}}

    iterations: int = field(default=100, metadata=require_count("prototype_inversion iterations", low=1))
    lr: float = field(default=0.02, metadata=require_number("prototype_inversion lr", low=0.0, open_low=True))
    neighbours: int = field(default=20, metadata=require_count("prototype_inversion neighbours", low=1))
    stay: float = field(default=0.1, metadata=require_number("prototype_inversion stay", low=0.0))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return for each class a row whose features approximate the class's prototype, (classes, *shape)."""
        classes = check_classes("prototype_inversion", knowledge.classes)
        known, embed = unwrap(knowledge.auxiliary), unwrap(knowledge.extractor)
        with torch.no_grad():
            embedded = embed(known)
        kind, labels, wanted = goals("prototype_inversion", view, embedded)
        wanted = wanted.to(knowledge.device)
        distances = torch.cdist(wanted, embedded[kind].flatten(1))
        nearest = distances.topk(min(self.neighbours, len(known)), largest=False).indices
        start = torch.stack([known[rows].mean(0) for rows in nearest])
        size = wanted.square().sum(1).clamp_min(torch.finfo(wanted.dtype).tiny)

        def loss(x: Tensor) -> Tensor:
            misfit = (embed(x)[kind].flatten(1) - wanted).square().sum(1) / size
            return (misfit + self.stay * (x - start).square().flatten(1).mean(1)).sum()

        found = descend_within(start, loss, knowledge.value_range, self.iterations, self.lr, progress)
        reconstructions = known.mean(0).expand(classes, *knowledge.shape).clone()
        for row, label in zip(found, labels, strict=True):
            if label < classes:
                reconstructions[label] = row
        return reconstructions
