"""Isotropic noise on gradients, as strong as the longest gradient of the batch.

Paper: Li, Sun, Yang, Gao, Zhang, Xie, Smith, Wang, "Label leakage and protection in two-party split learning", ICLR
2022 (the heuristic `iso` that Marvell is compared with).

Every number of every row gets Gaussian noise of deviation ratio max‖g‖/sqrt(d), d being the numbers of a row, so that
the root mean square length of the noise on a row is `ratio` times the length of the longest gradient. The scale depends
on the batch, so there is no formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.defense import GradientDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import require_number
from splitfed.core.rows import flat_rows
from splitfed.defenses.label_edges import LabelGuard


@dataclass(frozen=True)
class Iso(LabelGuard, GradientDefense):
    """Adds isotropic noise whose length is `ratio` >= 0 times the greatest norm in the batch."""

    ratio: float = field(
        default=1.0, metadata=require_number("iso ratio", low=0.0) | as_strength("longest gradients of the batch")
    )

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return `g` plus noise drawn afresh for this step: same shape."""
        longest = flat_rows(g.detach().double()).norm(dim=1).max()
        deviation: Tensor = (self.ratio * longest / g[0].numel() ** 0.5).to(g.dtype)
        drawn = torch.randn(g.shape, generator=context.generator(name, g.device), device=g.device, dtype=g.dtype)
        return g + drawn * deviation
