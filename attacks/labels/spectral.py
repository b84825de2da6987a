"""Spectral: separates two classes by the direction in which cut values vary most.

Paper: Sun, Yang, Yao, Wang, "Label leakage and protection from forward embedding in vertical federated learning", 2022.
Rows are centered and projected on the first right singular vector. Its sign is arbitrary: the smaller of the two groups
along it is called positive, on the adversary's assumption that positives are the rarer class. If both are equally
frequent, or negatives rarer, the sign is random or wrong, and the truth is not used to correct it. The paper's rows are
the party's own embeddings; ours are the gradients at the cut, or the releases received by a party between two others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.attacks.base import DefenseEffect, Knowledge, Progress
from splitfed.attacks.labels.label_attack import LabelAttack, boundary, check_two_classes, gradient_rows
from splitfed.core.errors import InvalidInput, require_name
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows

ROWS = ("gradients", "releases")


@dataclass(frozen=True)
class Spectral(LabelAttack):
    """Predicts two classes by the sign of the first principal component of the received values.

    `rows`: "gradients", or the "releases" that arrived in the same step.
    """

    rows: str = field(default="gradients", metadata=require_name("spectral rows", ROWS))

    @property
    def adapts_to(self) -> frozenset[DefenseEffect] | None:
        """Effects on the task's loss weight, which keep the directions of gradients; undeclared (None) for releases."""
        return frozenset({DefenseEffect.TASK_WEIGHT}) if self.rows == "gradients" else None

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the projections minus the boundary, positive for the smaller group: (victims,)."""
        check_two_classes("spectral", knowledge.classes)
        rows = (
            gradient_rows(view, knowledge.device)
            if self.rows == "gradients"
            else _concatenate_releases(view, knowledge)
        )
        centered = (rows - rows.mean(0)).double()
        first = torch.linalg.svd(centered, full_matrices=False).Vh[0]
        along: Tensor = centered @ first
        along = along - boundary(along)
        return -along if int((along > 0).sum()) * 2 > len(along) else along


def _concatenate_releases(view: View, knowledge: Knowledge) -> Tensor:
    seen = view.select(kind="activation").tensors(knowledge.device)
    if not seen:
        raise InvalidInput(f"spectral rows='releases' needs releases; {view.party} receives none")
    return torch.cat([flat_rows(z) for z in seen.values()], 1)
