"""Improved deep leakage: the class is read off the last layer's gradient first, then only the row is searched.

Paper: Zhao, Mopuri, Bilen, "iDLG: improved deep leakage from gradients", 2020.

With cross-entropy the gradient of the last bias is p - y, negative at the true class alone. That tells one class, so
the batch must be one row. The row is searched as in `dlg`, with the same deviations: |g(x) - g*|² by L-BFGS. The label
must be the client's own loss's: of a split model's bottom there is none, and `dlg` is the attack. Where the client
clips its rows' gradients (DP-SGD), the prediction's is clipped too: at the class that was read off, none is as short.
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
    """`iterations` of L-BFGS from each of `restarts` starts."""

    phase: ClassVar[Phase] = Phase.TRAINING
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.UPDATES})
    adapts_to = frozenset({DefenseEffect.WEIGHTS})
    budgets: ClassVar[Budgets] = {"fast": QUICK, "paper": {"iterations": 300, "restarts": 1}}

    iterations: int = field(default=200, metadata=require_count("idlg iterations", low=1))
    restarts: int = field(default=3, metadata=require_count("idlg restarts", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return (1, *shape)."""
        local = unwrap(knowledge.local)
        check_hard_labels("Idlg", local)
        step = newest_step(view, local)
        if step.rows != 1:
            raise InvalidInput(f"Idlg reads one class off a gradient; the client's batch has {step.rows} rows")
        if not local.heads:
            raise InvalidInput("Idlg reads the class off the client's own loss; this client has none: take Dlg")
        client = ClientGradient(view.segments, local, step, knowledge.device)
        labels = {h.value: single_class_logits(h, client) for h in local.heads}
        return best_fit(client, knowledge.shape, labels, self.iterations, self.restarts, generator, progress)
