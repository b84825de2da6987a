"""Quantization: sends every number of a release as one of a few equally spaced levels, in few bits.

Paper: Jacob, Kligys, Chen, Zhu, Tang, Howard, Adam, Kalenichenko, "Quantization and training of neural networks for
efficient integer-arithmetic-only inference", CVPR 2018, for the uniform levels between the least and the greatest
number; Bengio, Leonard, Courville, "Estimating or propagating gradients through stochastic neurons", 2013, for the
straight-through gradient.

The levels lie between the least and the greatest number of the batch's release, of all of it or of each channel. On the
wire: the codes in `bits` bits each, without gaps, and for each range its least number and the distance of two levels.
If that would not be shorter than the release itself, the release's bytes are counted. Unlike in Jacob et al. zero need
not be a level. The levels depend on the whole batch. No formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from splitfed.core.defense import Codec, ReleaseDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import require_count, require_name
from splitfed.defenses.binary_encoding import packed_size

PER = ("tensor", "channel")


@dataclass(frozen=True)
class Quantization(ReleaseDefense, Codec):
    """Rounds every release to equally spaced levels.

    `bits`: 1 to 16, for 2^bits levels. `per`: one range for the "tensor", or one for each "channel" (first dimension of
    a row).
    """

    bits: int = field(
        default=8, metadata=require_count("quantization bits", low=1, high=16) | as_strength("a number", rises=False)
    )
    per: str = field(default="tensor", metadata=require_name("quantization per", PER))

    on_uploads = True
    """It can act on uploads too, as it accepts rows of any shape."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the received release: `z` rounded to the levels, with the gradient of `z`: same shape."""
        # In this order the sum is exact: a release in which digits of z are left over would be no level.
        return decode(*encode(z.detach(), self.bits, self.per)) + (z - z.detach())

    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return the bytes of the codes and of the ranges."""
        if kind != "activation":
            return None
        numbers, ranges = rows * prod(shape), shape[0] if self.per == "channel" and shape else 1
        return min(packed_size(numbers, self.bits) + 2 * ranges * dtype.itemsize, numbers * dtype.itemsize)


def encode(z: Tensor, bits: int, per: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of `z` (batch, ...), whole numbers in its dtype, and the minimum and step of each range.

    The ranges broadcast against `z`. The step of a range of equal numbers is 0.
    """
    # What is not finite makes its whole range not a number, and the run stops with the edge named.
    if per == "channel" and z.dim() > 1:
        dims = tuple(d for d in range(z.dim()) if d != 1)
        low, high = z.amin(dims, keepdim=True), z.amax(dims, keepdim=True)
    else:
        low, high = z.min(), z.max()
    step = (high - low) / (2**bits - 1)
    codes = torch.where(step == 0, 0.0, (z.float() - low.float()) / step.float())
    return codes.round().clamp(0, 2**bits - 1), low, step


def decode(codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """Return low + codes * step, the quantized values: same shape as `codes`, dtype of `low`."""
    return (low.float() + codes * step.float()).to(low.dtype)
