"""Low-rank compression of weight updates: matrices by their largest singular values, other tensors unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

MARKS = ("#u", "#s", "#v")


def compress_update(
    update: Mapping[str, Tensor], energy: float | None = None, rank: int | None = None
) -> dict[str, Tensor]:
    """Return `update` with every matrix (kernels flattened behind their first dimension) replaced by three factors.

    `rank` singular values are kept, or the fewest whose squares add up to a fraction `energy` of the total; at least
    one. Tensors that factors would not make smaller, and those that are no matrices, stay whole. For tensors on "meta",
    which have shapes only, the factors for `energy` are unknown, and every matrix stays whole.
    """
    factors_by_name: dict[str, Tensor] = {}
    for name, tensor in update.items():
        factors = _factors(tensor, energy, rank) if tensor.dim() > 1 and tensor.is_floating_point() else None
        if factors is None:
            factors_by_name[name] = tensor
        else:
            factors_by_name |= {name + mark: factor for mark, factor in zip(MARKS, factors, strict=True)}
    return factors_by_name


def decompress_update(sent: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the update that `sent` encodes; `shapes`: tensors of its names and shapes."""
    found = {}
    for name, like in shapes.items():
        if name in sent:
            found[name] = sent[name]
        else:
            u, s, v = (sent[name + mark] for mark in MARKS)
            found[name] = ((u * s) @ v).reshape(like.shape)
    return found


def add_update(base: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `base` plus `update`; `base` itself if the update has shapes only (device "meta")."""
    # The initial weights may be on another device than the update.
    there = {name: tensor if update[name].is_meta else tensor.to(update[name].device) for name, tensor in base.items()}
    return {name: tensor if update[name].is_meta else tensor + update[name] for name, tensor in there.items()}


def rank_for_energy(values: Tensor, energy: float) -> int:
    """Return how many of the singular `values` (largest first) hold a fraction `energy` of the sum of squares.

    `energy`: in (0, 1]. The result is at least 1.
    """
    squares = values.double().square()
    total = float(squares.sum())
    if total == 0:
        return 1
    # A remainder of the size of the rounding error counts as zero.
    short = squares.cumsum(0) < energy * total * (1 - 1e-12)
    return min(int(short.sum()) + 1, len(values))


def _factors(tensor: Tensor, energy: float | None, rank: int | None) -> tuple[Tensor, Tensor, Tensor] | None:
    rows, columns = tensor.shape[0], prod(tensor.shape[1:])
    most = rows * columns / (rows + columns + 1)
    if rank is not None:
        rank = min(rank, rows, columns)
        if rank >= most:
            return None
    elif tensor.is_meta:
        return None
    if tensor.is_meta:
        assert rank is not None
        return tensor.new_empty(rows, rank), tensor.new_empty(rank), tensor.new_empty(rank, columns)
    u, s, v = torch.linalg.svd(tensor.reshape(rows, columns), full_matrices=False)
    if rank is None:
        assert energy is not None
        rank = rank_for_energy(s, energy)
        if rank >= most:
            return None
    return u[:, :rank].contiguous(), s[:rank].clone(), v[:rank].clone()
