"""What crosses for a quantized release and for one with its largest numbers alone: as bytes, and back.

Runs send tensors and count the bytes of these formats; here is the proof that what is released fits into them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.defenses.quantization import decode, encode
from splitfed.defenses.top_k import place_bits, places


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Return `codes`, whole numbers in [0, 2^bits), flattened, as bytes: (packed_size,) uint8."""
    places = torch.arange(bits, device=codes.device)
    single = (codes.flatten().long()[:, None] >> places & 1).flatten()
    filled = torch.cat([single, single.new_zeros(-len(single) % 8)]).view(-1, 8)
    return (filled << torch.arange(8, device=codes.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """Return the `count` numbers that `pack_bits` wrote: (count,) int64."""
    single = (packed.long()[:, None] >> torch.arange(8, device=packed.device) & 1).flatten()[: count * bits]
    return (single.view(count, bits) << torch.arange(bits, device=packed.device)).sum(1)


def pack_levels(z: Tensor, bits: int, per: str) -> tuple[Tensor, Tensor]:
    """Return what crosses for `z`: the codes as bytes, and the ranges (2, ...) of the type of `z`."""
    codes, low, step = encode(z, bits, per)
    return pack_bits(codes, bits), torch.stack([low, step])


def unpack_levels(packed: Tensor, ranges: Tensor, shape: torch.Size, bits: int) -> Tensor:
    """Return the levels in `shape`."""
    codes = unpack_bits(packed, shape.numel(), bits).view(shape)
    return decode(codes.float(), ranges[0], ranges[1])


def pack_top_k(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what crosses for `z`: the values (batch, k) and the places as bytes."""
    where = places(z, k)
    flat = z.flatten(1)
    return flat.gather(1, where), pack_bits(where, place_bits(flat.shape[1]))


def unpack_top_k(values: Tensor, packed: Tensor, shape: torch.Size) -> Tensor:
    """Return the tensor of `shape` (batch, ...) with `values` at their places and zeros elsewhere."""
    flat = values.new_zeros(len(values), shape.numel() // max(len(values), 1))
    where = unpack_bits(packed, values.numel(), place_bits(flat.shape[1])).view_as(values)
    return flat.scatter(1, where, values).view(shape)
