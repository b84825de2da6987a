"""Refinement: searches near a first prediction for rows whose release, under known weights, fits a given one better.

Source: ours, after the white-box search of He, Zhang, Lee, "Model inversion attacks against collaborative inference",
ACSAC 2019, with a decoder's prediction as its prior.

For a row x of d_x numbers with the prediction x_0 and the release z of d_z numbers, minimise

    max(|f(x) - z|² - s² d_z, 0) / (2 s²) + |x - x_0|² / (2 v t) + tv TV(x)

with Adam, its rate falling along half a cosine. s² is the mean squared error of f per released number on rows that the
adversary knows (noise of a defense, and all else that f does not model); v is the mean squared error of predictions per
number on such rows. The release is not fitted beyond s² (the discrepancy principle). As z was used for x_0 already,
this is no posterior: t, chosen on rows that the adversary knows, limits the distance from x_0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.attacks.base import Progress, Releases
from splitfed.attacks.reconstruction.inversion import descend_rows, roughness, width
from splitfed.core.rows import flat_rows

LEAST_NOISE = 1e-8
"""Lower bound of s², relative to the variance of the release, so that the prior keeps some weight."""


@dataclass(frozen=True)
class Refinement:
    """A search from `start` (rows, *shape) for rows whose release under `function` equals `seen`.

    `noise`: s², > 0; `residual`: v, > 0; `reach`: t, > 0; `tv`: weight of the total variation, >= 0.
    """

    seen: Releases
    function: Callable[[Tensor], Releases]
    start: Tensor
    noise: float
    residual: float
    reach: float
    tv: float = 0.0

    def run(self, steps: int, lr: float, progress: Progress | None = None) -> Tensor:
        """Return the rows after `steps` of Adam from rate `lr`: (rows, *shape)."""
        allowed = self.noise * width(self.seen)
        # Adam accepts gradients of any size, but not one below its epsilon.
        whole = width(self.seen) + self.start[0].numel() / self.reach

        def loss(x: Tensor) -> Tensor:
            fit = (self._misfit(x) - allowed).clamp(min=0.0) / (2 * self.noise)
            prior = (x - self.start).square().flatten(1).sum(1) / (2 * self.residual * self.reach)
            return (fit + prior + self.tv * x[0].numel() * roughness(x) / self.residual).sum() / whole

        return descend_rows(self.start, loss, steps, lr, progress)

    def _misfit(self, x: Tensor) -> Tensor:
        """Return |f(x) - z|² of every row: (rows,)."""
        released = self.function(x)
        return torch.stack([flat_rows((released[n] - z).square()).sum(1) for n, z in self.seen.items()]).sum(0)


@torch.no_grad()
def measure_noise(function: Callable[[Tensor], Releases], x: Tensor, seen: Releases) -> float:
    """Return the mean squared difference between the releases `seen` of rows `x` and those that `function` computes."""
    released = function(x)
    total = sum(float((released[n] - z).square().sum()) for n, z in seen.items()) / (len(x) * width(seen))
    variance = sum(float((z - z.mean(0)).square().sum()) for z in seen.values()) / (len(x) * width(seen))
    return max(total, LEAST_NOISE * variance, torch.finfo(torch.float32).tiny)
