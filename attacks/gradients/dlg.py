"""Deep leakage from gradients: optimizes rows and labels until their gradient equals that of a client's update.

Paper: Zhu, Liu, Han, "Deep leakage from gradients", NeurIPS 2019.

Minimises |g(x, y) - g*|² with L-BFGS over rows and labels together, from normal noise. The adversary is the aggregation
server of a run that was recorded, against one client and one round with one step of SGD, or with method "fedsgd", whose
clients send the gradient itself. Deviates: with a line search, in double precision, in units of |g*|², and from several
starts, of which the one with the smallest misfit is kept. If clients hold only the bottom of a split model, the
gradient at the cut is optimized in place of the labels (see `gradient_matching`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Budgets, DefenseEffect, Knowledge, Needs, Phase, Progress
from splitfed.attacks.gradients.gradient_matching import client_gradient
from splitfed.attacks.gradients.lbfgs_search import QUICK, best_fit
from splitfed.core.errors import require_count
from splitfed.core.messages import View


@dataclass(frozen=True)
class Dlg(Attack):
    """Optimizes rows and labels by `iterations` of L-BFGS from each of `restarts` starts."""

    phase: ClassVar[Phase] = Phase.TRAINING
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.UPDATES})
    adapts_to = frozenset(
        {DefenseEffect.RELEASE, DefenseEffect.GRADIENT, DefenseEffect.RECEIVER_PENALTY, DefenseEffect.WEIGHTS}
    )
    budgets: ClassVar[Budgets] = {"quick": QUICK, "full": {"iterations": 1200, "restarts": 1}}

    iterations: int = field(default=200, metadata=require_count("dlg iterations", low=1))
    restarts: int = field(default=3, metadata=require_count("dlg restarts", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the reconstructed rows, (rows, *shape), in no particular order."""
        client = client_gradient(view, knowledge)
        return best_fit(client, knowledge.shape, None, self.iterations, self.restarts, generator, progress)
