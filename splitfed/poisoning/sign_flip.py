"""Sign flip: clients upload their update turned round, times a factor.

Paper: Li, Xu, Chen, Giannakis, Ling, "RSA: Byzantine-robust stochastic aggregation methods for distributed learning
from heterogeneous datasets", AAAI 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitfed.core.errors import check_number
from splitfed.poisoning.base import Poisoning, Tensors, change_update


@dataclass(frozen=True, kw_only=True)
class SignFlip(Poisoning):
    """The update is multiplied by -`factor`."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a factor that is no positive number."""
        super().__post_init__()
        check_number("sign_flip factor", self.factor, low=0.0, open_low=True)

    def upload(self, before: Tensors, after: Tensors, random: torch.Generator) -> Tensors:
        """Return before - factor (after - before)."""
        return change_update(before, after, lambda step: -self.factor * step)
