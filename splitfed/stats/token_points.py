"""Rows of token ids as points, so that their distances do not depend on the numbering of tokens.

The distance of two rows is that of their one-hot encodings, the root of twice the number of positions in which they
differ (the Hamming distance). It is Euclidean, so a distance correlation of it is zero only for independence, as that
of real numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 1 << 24
"""Maximum number of token comparisons in memory at a time."""


@torch.no_grad()
def token_points(rows: Tensor) -> Tensor:
    """Return points (n, n), float64, with the distances of the one-hot encodings of `rows` (n, ...), whole numbers.

    Distances are accurate to about 1e-6, also those of equal rows.
    """
    flat = rows.reshape(len(rows), -1)
    same = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat.device)
    for part in flat.split(max(1, _AT_ONCE // max(len(flat) ** 2, 1)), dim=1):
        same += (part[:, None] == part[None]).sum(-1)
    # The products of the encodings; points with the same products have the same distances.
    values, vectors = torch.linalg.eigh(same)
    values = torch.where(values > values.abs().max() * len(flat) * torch.finfo(values.dtype).eps, values, 0.0)
    points: Tensor = vectors * values.sqrt()
    return points


def as_points(rows: Tensor) -> Tensor:
    """Return `rows` (n, ...) unchanged if they are real numbers, else their `token_points`."""
    return rows if rows.is_floating_point() else token_points(rows)
