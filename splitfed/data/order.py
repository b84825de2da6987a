"""The order of rows in an epoch: a permutation that depends on seed, epoch and party only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from splitfed.errors import check_count
from splitfed.seeding import generator


def batches(
    count: int, size: int, seed: int, epoch: int, *words: str | int, drop_last: bool = False
) -> Iterator[Tensor]:
    """Yield (size,) int64 positions that visit 0 to `count` - 1 once, ordered by seed, epoch and words.

    The last batch may be smaller; `drop_last` leaves it out then.
    """
    check_count("count", count)
    check_count("batch size", size, low=1)
    order = torch.randperm(count, generator=generator(seed, "order", epoch, *words))
    end = count - count % size if drop_last else count
    return (order[start : min(start + size, end)] for start in range(0, end, size))
