"""Kernel matrices over rows: linear and Gaussian, with the median of the distances as bandwidth.

Paper: Gretton, Borgwardt, Rasch, Schoelkopf and Smola, "A kernel two-sample test", JMLR 2012, section 8 (the median
heuristic).

Rows are `(..., n, d)`, float; leading dimensions are a batch, each entry with rows and a bandwidth of its own.
Everything is differentiable in the rows, except that a bandwidth counts as a constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


def check_rows(name: str, x: Tensor, least: int = 1) -> None:
    """Raise `InvalidInput` unless `x` is real, finite `(..., n, d)` with `least` rows or more."""
    if x.dim() < 2 or x.numel() == 0 or not x.is_floating_point():
        raise InvalidInput(f"{name} is {x.dtype} of shape {tuple(x.shape)}; expected floats of shape (..., n, d)")
    if x.shape[-2] < least:
        raise InvalidInput(f"{name} has {x.shape[-2]} rows; expected at least {least}")
    if not bool(torch.isfinite(x).all()):
        raise InvalidInput(f"{name} holds a value that is not finite; expected finite numbers")


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return squared Euclidean distances `(..., n, m)` between the rows of `x` (..., n, d) and `y` (..., m, d)."""
    # Far from the origin the products would lose every digit: a common point goes first.
    middle = y.detach().mean(-2, keepdim=True)
    x, y = x - middle, y - middle
    norms = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
    return (norms - 2 * x @ y.mT).clamp_min(0)


@torch.no_grad()
def median_bandwidth(x: Tensor) -> Tensor:
    """Return the median distance `(...,)` between two different rows of `x` (..., n, d), n >= 2, in units of x.

    For an even number of distances it is the lower middle one. If it is zero (most rows are equal), the largest
    distance, and 1 if that is zero too.
    """
    check_rows("x", x, least=2)
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    distances = squared_distances(x, x)[..., i, j].sqrt()
    median, largest = distances.median(-1).values, distances.amax(-1)
    median = torch.where(median > 0, median, largest)
    return torch.where(median > 0, median, torch.ones_like(median))


def gaussian_kernel(x: Tensor, y: Tensor, bandwidth: Tensor | float) -> Tensor:
    """Return exp(-|x_i - y_j|² / (2 bandwidth²)), `(..., n, m)` in (0, 1]; `bandwidth` > 0 is a number or `(...,)`."""
    width = torch.as_tensor(bandwidth, dtype=x.dtype, device=x.device)
    if not bool(((width > 0) & torch.isfinite(width)).all()):
        raise InvalidInput(f"bandwidth={bandwidth!r} is not allowed; expected finite numbers above 0")
    return torch.exp(-squared_distances(x, y) / (2 * width.square())[..., None, None])


def linear_kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products `(..., n, m)` of the rows of `x` (..., n, d) and `y` (..., m, d)."""
    return x @ y.mT
