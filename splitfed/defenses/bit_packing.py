"""Whole numbers of any few bits as bytes, without gaps, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(count: int, bits: int) -> int:
    """Return the bytes that `count` numbers of `bits` bits take, the last byte filled up."""
    return -(-count * bits // 8)


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
