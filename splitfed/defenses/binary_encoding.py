"""Numbers as bits and back into a network: what `latent` puts into the segments on both sides of a cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def to_bits(values: Tensor, whole: int, fraction: int) -> Tensor:
    """Return `values` (batch, r) as 0 and 1: (batch, r l), l = 1 + `whole` + `fraction`, the sign first (1: negative).

    Magnitudes are rounded down to steps of 2^-`fraction` and capped at the largest number that fits. The gradient is
    that of smooth waves which cross one half where a bit flips, so that whoever differentiates through the cut, an
    adversary above all, is not stopped by the steps.
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


def from_bits(bits: Tensor, whole: int, fraction: int) -> Tensor:
    """Return the numbers that `bits` (batch, r l) spell: (batch, r)."""
    rows = bits.unflatten(1, (-1, 1 + whole + fraction))
    powers = 2.0 ** torch.arange(whole - 1, -fraction - 1, -1, device=bits.device, dtype=bits.dtype)
    spelled: Tensor = (1 - 2 * rows[..., 0]) * (rows[..., 1:] * powers).sum(-1)
    return spelled


class Binarised(nn.Module):
    """Runs `module` and turns its outputs at `positions` into bits."""

    def __init__(self, module: nn.Module, positions: Sequence[int], whole: int, fraction: int) -> None:
        super().__init__()
        self.module, self.positions, self.whole, self.fraction = module, tuple(positions), whole, fraction
        self.training = module.training

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return what the module returns, bits in place of numbers: (batch, r l)."""
        result = self.module(*inputs)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        for i in self.positions:
            outputs[i] = to_bits(outputs[i].flatten(1), self.whole, self.fraction)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


class Reader(nn.Module):
    """Puts a dense layer before the inputs of `module` that arrive as bits, which makes `shapes` of them again."""

    def __init__(self, module: nn.Module, shapes: dict[int, tuple[int, ...]], length: int) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        sizes = {i: int(torch.Size(shape).numel()) for i, shape in shapes.items()}
        self.dense = nn.ModuleDict({str(i): nn.Linear(n * length, n) for i, n in sizes.items()})
        self.module = module
        self.training = module.training

    def forward(self, *inputs: Tensor) -> object:
        """Return what the module makes of the inputs, those that are bits read first."""
        given = list(inputs)
        for i, shape in self.shapes.items():
            given[i] = self.dense[str(i)](given[i]).unflatten(1, shape)
        return self.module(*given)
