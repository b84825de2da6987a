"""Byzantine noise: clients upload normal noise in place of their update.

Paper: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine tolerant gradient
descent", NIPS 2017 (the Gaussian attack).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.errors import require_number
from splitfed.poisoning.base import Poisoning, Tensors, change_update


@dataclass(frozen=True, kw_only=True)
class ByzantineNoise(Poisoning):
    """Uploads normal noise of standard deviation `scale`, in units of the weights.

    `add`: whether the noise is added to the update instead of replacing it.
    """

    scale: float = field(default=1.0, metadata=require_number("byzantine_noise scale", low=0.0, open_low=True))
    add: bool = False

    def upload(self, before: Tensors, after: Tensors, random: torch.Generator) -> Tensors:
        """Return before + noise, or after + noise."""

        def bend(step: Tensor) -> Tensor:
            drawn = torch.randn(step.shape, generator=random, device=random.device)
            noise = self.scale * drawn.to(step.device, step.dtype)
            return step + noise if self.add else noise

        return change_update(before, after, bend)
