"""Improved deep leakage: derives the class from the last layer's gradient, then optimizes the row alone.

Paper: Zhao, Mopuri, Bilen, "iDLG: improved deep leakage from gradients", 2020. With cross-entropy the gradient of the
last bias is p - y, negative at the true class alone. That determines one class, so the batch must be one row. The row
is optimized as in `dlg`, with the same deviations: |g(x) - g*|² by L-BFGS. The client must hold the loss: for the
bottom of a split model, which has none, use `dlg`. If the client clips per-row gradients (DP-SGD), the prediction's
gradient is clipped too, at the derived class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Budgets, DefenseEffect, Knowledge, Needs, Phase, Progress, unwrap
from splitfed.attacks.gradients.gradient_matching import ClientGradient, newest_step, single_class_logits
from splitfed.attacks.gradients.lbfgs_search import QUICK, best_fit
from splitfed.attacks.gradients.local_training import check_hard_labels
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.messages import View


@dataclass(frozen=True)
class Idlg(Attack):
    """Optimizes one row by `iterations` of L-BFGS from each of `restarts` starts."""

    phase: ClassVar[Phase] = Phase.TRAINING
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.UPDATES})
    adapts_to = frozenset({DefenseEffect.WEIGHTS})
    budgets: ClassVar[Budgets] = {"quick": QUICK, "full": {"iterations": 300, "restarts": 1}}

    iterations: int = field(default=200, metadata=require_count("idlg iterations", low=1))
    restarts: int = field(default=3, metadata=require_count("idlg restarts", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the reconstructed row, (1, *shape)."""
        local = unwrap(knowledge.local)
        check_hard_labels("Idlg", local)
        step = newest_step(view, local)
        if step.rows != 1:
            raise InvalidInput(
                f"Idlg derives one class from a gradient; expected a batch of 1 row, the client's has {step.rows}"
            )
        if not local.heads:
            raise InvalidInput("Idlg derives the class from the client's own loss; this client has none: use Dlg")
        client = ClientGradient(view.segments, local, step, knowledge.device)
        labels = {h.value: single_class_logits(h, client) for h in local.heads}
        return best_fit(client, knowledge.shape, labels, self.iterations, self.restarts, generator, progress)
