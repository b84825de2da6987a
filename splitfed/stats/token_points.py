"""Rows of token ids as points, so that distances between them do not depend on which number stands for which token.

Two rows are as far apart as their one-hot encodings are, the root of twice the number of positions in which they
differ (the Hamming distance). That is a Euclidean distance, so a distance correlation of it is zero for independence
alone, as that of real numbers is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 1 << 24
"""How many comparisons of two tokens are held at a time."""


@torch.no_grad()
def token_points(rows: Tensor) -> Tensor:
    """Return points (n, n), float64, as far apart as the one-hot encodings of `rows` (n, ...), whole numbers.

    Distances are right to about 1e-6; equal rows are within that of one another.
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
    """Return `rows` (n, ...) as they are where they are real numbers, and as `token_points` where they are not."""
    return rows if rows.is_floating_point() else token_points(rows)
