"""Rows whose releases are nearest to given ones, by Euclidean distance in float64, computed in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 22  # numbers of a release held in float64 at a time


def nearest_positions(known: Tensor, z: Tensor, count: int) -> Tensor:
    """Return for each release in z (v, m) the positions of the `count` nearest in `known` (n, m): (v, count).

    The nearest comes first; `count` <= n.
    """
    centre = known.mean(0, dtype=torch.float64)
    own = known.new_zeros(len(z), len(known), dtype=torch.float64)
    step = max(1, _CHUNK // (len(z) + len(known)))
    # Differences of columns add up over parts of the columns, and so far from the origin no digit is lost.
    for start in range(0, known.shape[1], step):
        columns = slice(start, start + step)
        left, right = (part[:, columns].double() - centre[columns] for part in (z, known))
        own += left.square().sum(1)[:, None] - 2 * left @ right.T + right.square().sum(1)[None]
    return own.topk(count, dim=1, largest=False).indices


def nearest_means(known: Tensor, x: Tensor, z: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return for each k in `counts` the mean of the k rows of x (n, d) nearest to z (v, m): (v, d), float64.

    `known`: (n, m) releases of x, between which and z distances are taken.
    """
    positions = nearest_positions(known, z, max(counts))
    rows = x.double()
    return [rows[positions[:, :count]].mean(1) for count in counts]
