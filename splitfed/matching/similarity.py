"""Similarities of two sets of rows: cosine, HSIC, kernel alignment and maximum mean discrepancy.

Paper: Gretton, Bousquet, Smola and Schoelkopf, "Measuring statistical dependence with Hilbert-Schmidt norms", ALT 2005
(HSIC); Cortes, Mohri and Rostamizadeh, "Algorithms for learning kernels based on centered alignment", JMLR 2012, and
Kornblith, Norouzi, Lee and Hinton, "Similarity of neural network representations revisited", ICML 2019 (centred kernel
alignment); Gretton, Borgwardt, Rasch, Schoelkopf and Smola, "A kernel two-sample test", JMLR 2012 (MMD, and in section
8 the median heuristic for bandwidths).

There are two kinds. HSIC and alignment, like the distance correlation of `splitfed.stats.dependence`, are of *pairs*:
row i of `x` belongs to row i of `z`, and shuffling one of them changes the value. MMD and the cosine compare two
*sets*: the order of rows does not matter and their numbers may differ.

Arguments are `(..., n, d)`, float; leading dimensions are a batch, each entry with rows and a bandwidth of its own.
Every value is differentiable, except that a bandwidth counts as a constant.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosines `(..., n, m)` in [-1, 1] between the rows of `x` (..., n, d) and `y` (..., m, d).

    A row of zeros has no direction: its cosine with anything is 0.
    """
    _check_sets(x, y, 1)
    return functional.normalize(x, dim=-1) @ functional.normalize(y, dim=-1).mT


def hsic(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased Hilbert-Schmidt independence criterion `(...,)` of n >= 2 pairs of rows, never negative.

    It is tr(KHLH) / (n - 1)² for Gaussian kernels; each bandwidth is the median distance of the kernel's own argument,
    so that the value does not depend on units.
    """
    _check_pairs(x, z)
    kx, kz = (_centered(gaussian_kernel(rows, rows, median_bandwidth(rows))) for rows in (x, z))
    return (kx * kz).sum((-2, -1)) / (x.shape[-2] - 1) ** 2


def kernel_alignment(x: Tensor, z: Tensor) -> Tensor:
    """Return the centred kernel alignment (CKA) `(...,)` in [0, 1] of n >= 2 pairs of rows, with the linear kernel.

    It is the biased HSIC over the root of the product of both arguments' HSIC with themselves: 1 for z = a x + b, for
    any a != 0 and b; 0 if an argument is constant. It is invariant to rotations.
    """
    _check_pairs(x, z)
    return (_unit(x) * _unit(z)).sum((-2, -1))


def mmd_sqr(x: Tensor, y: Tensor, bandwidth: float) -> Tensor:
    """Return the unbiased squared maximum mean discrepancy `(...,)` of `x` (..., n, d) and `y` (..., m, d), n, m >= 2.

    With a Gaussian kernel of this `bandwidth`. Each row's kernel with itself is left out: the value has mean 0 for two
    samples of one distribution, and may be negative.
    """
    _check_sets(x, y, least=2)
    within = _mean_within(gaussian_kernel(x, x, bandwidth)) + _mean_within(gaussian_kernel(y, y, bandwidth))
    return within - 2 * gaussian_kernel(x, y, bandwidth).mean((-2, -1))


@torch.no_grad()
def median_bandwidth(x: Tensor) -> Tensor:
    """Return the median distance `(...,)` between two different rows of `x` (..., n, d), n >= 2, in units of x.

    For an even number of distances it is the lower middle one. If it is zero (most rows are equal), the largest
    distance, and 1 if that is zero too.
    """
    _check_rows("x", x, least=2)
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    distances = _squared_distances(x, x)[..., i, j].sqrt()
    median, largest = distances.median(-1).values, distances.amax(-1)
    median = torch.where(median > 0, median, largest)
    return torch.where(median > 0, median, torch.ones_like(median))


def gaussian_kernel(x: Tensor, y: Tensor, bandwidth: Tensor | float) -> Tensor:
    """Return exp(-|x_i - y_j|² / (2 bandwidth²)), `(..., n, m)` in (0, 1]; `bandwidth` > 0 is a number or `(...,)`."""
    width = torch.as_tensor(bandwidth, dtype=x.dtype, device=x.device)
    if not bool(((width > 0) & torch.isfinite(width)).all()):
        raise InvalidInput(f"bandwidth={bandwidth!r} is not allowed; expected finite numbers above 0")
    return torch.exp(-_squared_distances(x, y) / (2 * width.square())[..., None, None])


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return squared Euclidean distances `(..., n, m)` between the rows of `x` (..., n, d) and `y` (..., m, d)."""
    # Far from the origin the products would lose every digit: a common point goes first.
    middle = y.detach().mean(-2, keepdim=True)
    x, y = x - middle, y - middle
    norms = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
    return (norms - 2 * x @ y.mT).clamp_min(0)


def _mean_within(k: Tensor) -> Tensor:
    return (k.sum((-2, -1)) - k.diagonal(dim1=-2, dim2=-1).sum(-1)) / (k.shape[-1] * (k.shape[-1] - 1))


def _check_rows(name: str, x: Tensor, least: int) -> None:
    """Raise `InvalidInput` unless `x` is real, finite `(..., n, d)` with `least` rows or more."""
    if x.dim() < 2 or x.numel() == 0 or not x.is_floating_point():
        raise InvalidInput(f"{name} is {x.dtype} of shape {tuple(x.shape)}; expected floats of shape (..., n, d)")
    if x.shape[-2] < least:
        raise InvalidInput(f"{name} has {x.shape[-2]} rows; expected at least {least}")
    if not bool(torch.isfinite(x).all()):
        raise InvalidInput(f"{name} holds a value that is not finite; expected finite numbers")


def _check_sets(x: Tensor, y: Tensor, least: int) -> None:
    _check_rows("x", x, least)
    _check_rows("y", y, least)
    if x.shape[-1] != y.shape[-1]:
        raise InvalidInput(f"x has rows of {x.shape[-1]} values and y of {y.shape[-1]}; expected equal widths")


def _check_pairs(x: Tensor, z: Tensor) -> None:
    _check_rows("x", x, least=2)
    _check_rows("z", z, least=2)
    if x.shape[:-1] != z.shape[:-1]:
        raise InvalidInput(
            f"x has {tuple(x.shape[:-1])} rows and z has {tuple(z.shape[:-1])} rows; expected pairs of rows"
        )


def _centered(k: Tensor) -> Tensor:
    return k - k.mean(-1, keepdim=True) - k.mean(-2, keepdim=True) + k.mean((-2, -1), keepdim=True)


def _unit(x: Tensor) -> Tensor:
    """Return the centred linear kernel matrix scaled to norm 1; zeros if `x` is constant up to rounding."""
    # The mean row cancels in every centred product; without it no digits are lost far from the origin.
    rows = x - x.mean(-2, keepdim=True)
    k = _centered(rows @ rows.mT)
    norm = torch.linalg.matrix_norm(k)
    floor = (64 * torch.finfo(x.dtype).eps) ** 2 * x.square().sum((-2, -1))
    return k.div(norm.masked_fill(norm <= floor, torch.inf)[..., None, None])
