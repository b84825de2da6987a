"""Binary encoding of releases and its decoding, the layers that `latent` adds around a cut; size of packed codes."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from splitfed.core.rows import flat_rows


def to_bits(values: Tensor, whole: int, fraction: int) -> Tensor:
    """Return `values` (batch, r) as 0 and 1: (batch, r l), l = 1 + `whole` + `fraction`, the sign first (1: negative).

    Magnitudes are rounded down to steps of 2^-`fraction` and capped at the largest number that fits. The gradient is
    that of smooth waves which cross one half where a bit flips, so that adversaries can differentiate through the
    steps.
    """
    scaled = (values.abs() * 2.0**fraction).clamp(max=2.0 ** (whole + fraction) - 1)
    steps = scaled.detach().floor()
    # Doubles: a bit of a float32 magnitude is exact up to 24 places, more than any sensible number of them.
    powers = 2.0 ** torch.arange(whole + fraction - 1, -1, -1, device=values.device, dtype=torch.float64)
    hard = torch.remainder(torch.div(steps.double()[..., None], powers, rounding_mode="floor"), 2).to(values.dtype)
    hard = torch.cat([(values < 0).to(values.dtype)[..., None], hard], -1)
    waves = 0.5 - 0.5 * torch.sin(torch.pi * scaled[..., None] / powers.to(values.dtype))
    soft = torch.cat([torch.sigmoid(-values)[..., None], waves], -1)
    # In this order the wave cancels exactly: what leaves is 0 or 1, to the last bit.
    return (hard + (soft - soft.detach())).flatten(1)


class ToBits(nn.Module):
    """Layer that turns numbers (batch, ...) into bits: (batch, r l)."""

    def __init__(self, whole: int, fraction: int) -> None:
        super().__init__()
        self.whole, self.fraction = whole, fraction

    def forward(self, z: Tensor) -> Tensor:
        """Return the bits of every row."""
        return to_bits(flat_rows(z), self.whole, self.fraction)


def bit_reader(shape: tuple[int, ...], length: int) -> nn.Sequential:
    """Return a dense layer from bits, `length` for each number, to rows of `shape`."""
    size = prod(shape)
    return nn.Sequential(nn.Linear(size * length, size), nn.Unflatten(1, shape) if shape else nn.Flatten(0))


def packed_size(count: int, bits: int) -> int:
    """Return the bytes of `count` numbers of `bits` bits each, rounded up to a whole byte."""
    return -(-count * bits // 8)
