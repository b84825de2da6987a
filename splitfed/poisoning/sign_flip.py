"""Sign flip: clients upload their update with its sign reversed, times a factor.

Paper: Li, Xu, Chen, Giannakis, Ling, "RSA: Byzantine-robust stochastic aggregation methods for distributed learning
from heterogeneous datasets", AAAI 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from splitfed.core.errors import require_number
from splitfed.poisoning.base import Poisoning, Tensors, change_update


@dataclass(frozen=True, kw_only=True)
class SignFlip(Poisoning):
    """Multiplies the update by -`factor`."""

    factor: float = field(default=1.0, metadata=require_number("sign_flip factor", low=0.0, open_low=True))

    def upload(self, before: Tensors, after: Tensors, random: torch.Generator) -> Tensors:
        """Return before - factor (after - before)."""
        return change_update(before, after, lambda step: -self.factor * step)
