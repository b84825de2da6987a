"""Dropout: a fresh random mask on every release, in training and at inference.

Paper: He, Zhang, Lee, "Attacking and protecting data privacy in edge-cloud collaborative inference systems", IEEE
Internet of Things Journal 2021.

Every number of the release is zero with chance `rate`, and the others are divided by 1 - rate, so that the mean stays:
the usual dropout, never switched off. An adversary with several releases of the same row can average the masks out. No
formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.defense import ReleaseDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import require_number


@dataclass(frozen=True)
class Dropout(ReleaseDefense):
    """Sets random numbers of every release to zero and scales the others up.

    `rate`: probability of each number of a release to become zero, in [0, 1).
    """

    rate: float = field(
        default=0.5,
        metadata=require_number("dropout rate", low=0.0, high=1.0, open_high=True)
        | as_strength("of the numbers hidden"),
    )

    on_uploads = True
    """It can act on uploads too, as it accepts rows of any shape."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return `z` times a mask drawn afresh for this step: same shape."""
        drawn = torch.rand(z.shape, generator=context.generator(name, z.device), device=z.device)
        return z * ((drawn >= self.rate).to(z.dtype) / (1 - self.rate))

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return `z`, as the masks have mean one."""
        return z
