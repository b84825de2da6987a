"""Gradient rounding: rounds every number of a gradient to the nearest of a few equally spaced values.

Paper: Fu et al., "Label inference attacks against vertical federated learning", USENIX Security 2022 ("DiscreteSGD", a
relative of signSGD that they try as a defense of labels).

Their interval is the mean plus and minus two standard deviations of the gradients, cut into `bins` equal bins; numbers
are rounded to the nearest end of a bin. Theirs is measured once, in the first epoch, and their code takes it as a
parameter; ours is that of the gradient being sent, so that no state is kept. Numbers outside it are clamped, which the
paper does not state. On the wire: one byte a number, and two numbers of the gradient's type for the interval. Fu et al.
found little effect on their attacks: no formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from splitfed.core.defense import Codec, GradientDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import require_count
from splitfed.defenses.label_edges import LabelGuard

_CODE = torch.uint8


@dataclass(frozen=True)
class GradientRounding(LabelGuard, GradientDefense, Codec):
    """Rounds the returned gradient to the ends of equal bins.

    `bins`: number of equal bins of the interval, 1 to 255 (Fu et al.'s code: 12).
    """

    bins: int = field(
        default=12, metadata=require_count("gradient_rounding bins", low=1, high=255) | as_strength(rises=False)
    )

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return the received gradient: `g` rounded to `bins` + 1 values."""
        return unpack(*pack(g, self.bins)).to(g.dtype)

    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return the bytes of one code a number and of the interval."""
        return rows * prod(shape) * _CODE.itemsize + 2 * dtype.itemsize if kind == "gradient" else None


def pack(g: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Return the code of every number, uint8 in [0, bins], and the interval's low end and the width of a bin: (2,)."""
    exact = g.detach().double()
    spread = exact.std(correction=0)
    # What is sent decides, so that both sides count from the same two numbers.
    interval = torch.stack([exact.mean() - 2 * spread, 4 * spread / bins]).to(g.dtype)
    low, width = interval.double().unbind()
    steps = torch.where(width > 0, (exact - low) / width, 0.0)
    return steps.round().clamp(0, bins).to(_CODE), interval


def unpack(codes: Tensor, interval: Tensor) -> Tensor:
    """Return the numbers that the codes represent."""
    low, width = interval.unbind()
    return codes.to(interval.dtype) * width + low
