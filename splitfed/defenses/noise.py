"""Noise: adds fresh Gaussian or Laplace noise to every release, in training and at inference.

Paper: He, Zhang, Lee, "Attacking and protecting data privacy in edge-cloud collaborative inference systems", IEEE
Internet of Things Journal 2021, where sigma and b are absolute.

Nothing is clipped, so there is no sensitivity and no formal guarantee. `relative` measures the scale in standard
deviations of the batch's release, which makes strengths comparable between cuts; the paper's is absolute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.defense import ReleaseDefense, Strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import require_name, require_number

KINDS = ("gaussian", "laplace")


@dataclass(frozen=True)
class Noise(ReleaseDefense):
    """Adds noise of `scale`: the standard deviation of a Gaussian, or b of a Laplace distribution (deviation b√2).

    `relative`: whether the scale is in units of the standard deviation of the batch's release.
    """

    scale: float = field(default=1.0, metadata=require_number("noise scale", low=0.0, high=1e38))
    kind: str = field(default="gaussian", metadata=require_name("noise kind", KINDS))
    relative: bool = False

    @property
    def strength(self) -> Strength:
        """The scale of the noise."""
        unit = "deviations of the batch's release" if self.relative else "units of the release"
        return Strength("scale", self.scale, unit)

    on_uploads = True
    """It can act on uploads too, as it accepts rows of any shape."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return `z` plus noise drawn afresh for this step: same shape."""
        scale: float | Tensor = self.scale * z.detach().std(correction=0) if self.relative else self.scale
        return z + scale * _draw(self.kind, z, context.generator(name, z.device))

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return `z`, as the noise has mean zero."""
        return z


def _draw(kind: str, z: Tensor, generator: torch.Generator) -> Tensor:
    if kind == "gaussian":
        return torch.randn(z.shape, generator=generator, device=z.device, dtype=z.dtype)
    # A Laplace variable is the difference of two exponential ones.
    first, second = (torch.empty_like(z).exponential_(generator=generator) for _ in range(2))
    return first - second
