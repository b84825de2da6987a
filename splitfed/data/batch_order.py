"""Rows of every training step: a permutation cut into batches, or Poisson sampling, by seed, epoch and party only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from splitfed.core.errors import check_count
from splitfed.core.random import generator, wide_generator


def batches(
    count: int, size: int, seed: int, epoch: int, *words: str | int, drop_last: bool = False
) -> Iterator[Tensor]:
    """Yield a random permutation of 0 to `count` - 1 in batches (size,), int64, drawn by `seed`, `epoch` and `words`.

    The last batch may be smaller; `drop_last` omits it then.
    """
    check_count("count", count)
    check_count("batch size", size, low=1)
    check_count("epoch", epoch)
    order = torch.randperm(count, generator=generator(seed, "order", epoch, *words))
    end = count - count % size if drop_last else count
    return (order[start : min(start + size, end)] for start in range(0, end, size))


def poisson_batches(count: int, size: int, seed: int, epoch: int, *words: str | int) -> Iterator[Tensor]:
    """Yield ceil(count / size) batches of positions; each has every one of `count` rows with probability size / count.

    All draws are independent, so a batch may have any size, including zero; if `size` exceeds `count` it has all rows.
    Participation must be as secret as the noise of a private step, so it comes from the same generator.
    """
    check_count("count", count)
    check_count("batch size", size, low=1)
    drawn = wide_generator(seed, "poisson", epoch, *words)
    chance = min(1.0, size / count) if count else 0.0
    steps = -(-count // size)
    return (
        torch.nonzero(torch.rand(count, generator=drawn, dtype=torch.float64) < chance).flatten() for _ in range(steps)
    )
