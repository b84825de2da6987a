"""White-box inversion: optimizes the input until its release, under the known upstream weights, equals a given one.

Paper: He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (white box, regularised
maximum likelihood estimation).

Per victim: minimise mean((f(x) - z)^2) + tv TV(x) + l2 mean(x^2) with Adam (amsgrad, eps 1e-3), TV the mean squared
difference of neighbours in each direction. All victims run as one batch; their losses are added, so each is optimised
as if alone. f includes the run's defenses at their mean.

Where a defense is random the attack adapts: the noise that it measures adds to tv
(`splitfed.attacks.reconstruction.inversion`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, Space, Span, unwrap
from splitfed.attacks.reconstruction.inversion import invert
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class Rmle(Attack):
    """Optimizes inputs by `iterations` of Adam at rate `lr`; `tv` and `l2`: weights of the two regularisers.

    `smoothness`: assumed variance of the difference of neighbours, which determines the weight that noise adds to tv.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.UPSTREAM})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"iterations": 300, "lr": 0.05, "tv": 0.01, "l2": 0.0},
        "standard": {"iterations": 2400, "lr": 0.3, "tv": 0.01, "l2": 0.0},
        "full": {"iterations": 5000, "lr": 0.01, "tv": 1.0, "l2": 0.0},
    }

    space: ClassVar[Space] = {"lr": Span(5e-3, 0.2, log=True), "tv": Span(1e-4, 1.0, log=True)}

    iterations: int = field(default=2400, metadata=require_count("rmle iterations", low=1))
    lr: float = field(default=0.3, metadata=require_number("rmle lr", low=0.0, open_low=True))
    tv: float = field(default=0.01, metadata=require_number("rmle tv", low=0.0))
    l2: float = field(default=0.0, metadata=require_number("rmle l2", low=0.0))
    smoothness: float = field(default=0.2, metadata=require_number("rmle smoothness", low=0.0, open_low=True))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the reconstructions, (victims, *shape), started at the middle of the value range (or at zero)."""
        return invert(
            view, knowledge, self.lr, self.iterations, progress,
            mean=unwrap(knowledge.upstream), sample=unwrap(knowledge.sample),
            tv=self.tv, l2=self.l2, smoothness=self.smoothness,
        )  # fmt: skip
