"""Selection of rows from a shuffled list in proportion to their classes."""

from __future__ import annotations

import torch
from torch import Tensor


def take(order: Tensor, count: int, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `count` rows of `order` and the others, both in the order given.

    order: (n,) int64 row numbers, shuffled. labels: (rows,) int64 classes by row number; the number from each class is
    its share by the method of largest remainders (ties to the lower class). Without labels the first rows are taken.
    """
    if labels is None:
        return order[:count], order[count:]
    _, classes, sizes = torch.unique(labels[order], return_inverse=True, return_counts=True)
    quota = apportion(count, sizes.tolist())
    taken = torch.zeros(len(order), dtype=torch.bool)
    for c, share in enumerate(quota):
        taken[(classes == c).nonzero().flatten()[:share]] = True
    return order[taken], order[~taken]


def apportion(count: int, sizes: list[int]) -> list[int]:
    """Return `count` divided in proportion to `sizes`, by largest remainders: sums to `count`, none above its size.

    >>> apportion(5, [50, 30, 20])
    [3, 1, 1]
    """
    total = sum(sizes)
    quota = [count * size // total for size in sizes]
    remainder = [count * size % total for size in sizes]
    for c in sorted(range(len(sizes)), key=lambda c: -remainder[c])[: count - sum(quota)]:
        quota[c] += 1
    return quota
