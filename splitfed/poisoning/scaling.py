"""Scaling: clients multiply their uploaded update by a factor, so that it dominates the average.

Paper: Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How to backdoor federated learning", AISTATS 2020 (model replacement:
with a factor of one over the client's share the average becomes its own model).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from splitfed.core.errors import require_number
from splitfed.poisoning.base import Poisoning, Tensors, change_update


@dataclass(frozen=True, kw_only=True)
class Scaling(Poisoning):
    """Multiplies the update by `factor`."""

    factor: float = field(default=10.0, metadata=require_number("scaling factor", low=0.0, open_low=True))

    def upload(self, before: Tensors, after: Tensors, random: torch.Generator) -> Tensors:
        """Return before + factor (after - before)."""
        return change_update(before, after, lambda step: self.factor * step)
