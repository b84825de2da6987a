"""Similarities of two sets of rows: cosine, HSIC, kernel alignment and maximum mean discrepancy.

Paper: Gretton, Bousquet, Smola and Schoelkopf, "Measuring statistical dependence with Hilbert-Schmidt norms", ALT 2005
(HSIC); Song, Smola, Gretton, Bedo and Borgwardt, "Feature selection via dependence maximization", JMLR 2012 (its
unbiased form); Cortes, Mohri and Rostamizadeh, "Algorithms for learning kernels based on centered alignment", JMLR
2012, and Kornblith, Norouzi, Lee and Hinton, "Similarity of neural network representations revisited", ICML 2019
(centred kernel alignment); Gretton et al., "A kernel two-sample test", JMLR 2012 (MMD).

There are two kinds. HSIC and alignment, like the distance correlation of `splitfed.stats.dependence`, are of *pairs*:
row i of `x` belongs to row i of `z`, and shuffling one of them changes the value. MMD and the cosine of the means
compare two *distributions*: the order of rows does not matter and their numbers may differ.

Arguments are `(..., n, d)`, float; leading dimensions are a batch. Every value is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput, check_names, check_number
from splitfed.matching.kernels import check_rows, gaussian_kernel, linear_kernel, median_bandwidth

Kernel = Literal["linear", "gaussian"]


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosines `(..., n, m)` in [-1, 1] between the rows of `x` (..., n, d) and `y` (..., m, d).

    A row of zeros has no direction: its cosine with anything is 0.
    """
    _check_sets(x, y, 1)
    return functional.normalize(x, dim=-1) @ functional.normalize(y, dim=-1).mT


def cosine_of_means(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine `(...,)` in [-1, 1] of the mean rows of `x` (..., n, d) and `y` (..., m, d)."""
    return cosine(x.mean(-2, keepdim=True), y.mean(-2, keepdim=True))[..., 0, 0]


def hsic(x: Tensor, z: Tensor, *, kernel: Kernel = "gaussian", unbiased: bool = False) -> Tensor:
    """Return the Hilbert-Schmidt independence criterion `(...,)` of `n` pairs of rows.

    Biased: tr(KHLH) / (n - 1)², never negative, n >= 2. Unbiased (n >= 4): of mean zero for independent pairs, so it
    may be negative; its mean over all permutations of `z` is exactly zero. The bandwidth of a Gaussian kernel is the
    median distance of its own argument, so that the value does not depend on units; linear kernels give squared units
    of x times those of z.
    """
    _check_pairs(x, z, least=4 if unbiased else 2)
    kx, kz = _kernel(x, kernel), _kernel(z, kernel)
    return _unbiased(kx, kz) if unbiased else (_centered(kx) * _centered(kz)).sum((-2, -1)) / (x.shape[-2] - 1) ** 2


def kernel_alignment(x: Tensor, z: Tensor, *, kernel: Kernel = "linear") -> Tensor:
    """Return the centred kernel alignment (CKA) `(...,)` in [0, 1] of `n` >= 2 pairs of rows.

    It is the biased HSIC over the root of the product of both arguments' HSIC with themselves: 1 for z = a x + b, for
    any a != 0 and b; 0 if an argument is constant. With the linear kernel it is also invariant to rotations.
    """
    _check_pairs(x, z, least=2)
    return (_unit(x, kernel) * _unit(z, kernel)).sum((-2, -1))


def mmd_sqr(
    x: Tensor, y: Tensor, *, unbiased: bool = True, bandwidths: Sequence[float] | Tensor | None = None
) -> Tensor:
    """Return the squared maximum mean discrepancy `(...,)` of `x` (..., n, d) and `y` (..., m, d).

    Gaussian kernels, averaged over `bandwidths` (None: the median distance of both sets together). The biased value
    lies in [0, 2] and is 0 for equal sets. The unbiased one (n, m >= 2) leaves out each row's kernel with itself; it
    has mean 0 for two samples of one distribution, and may be negative.
    """
    _check_sets(x, y, least=2 if unbiased else 1)
    if bandwidths is None:
        widths: list[Tensor | float] = [median_bandwidth(torch.cat([x, y], -2))]
    else:
        widths = [float(width) for width in bandwidths]
        for width in widths:
            check_number("bandwidth", width, low=0.0, open_low=True)
        if not widths:
            raise InvalidInput("bandwidths is empty; expected at least one number above 0")
    return torch.stack([_mmd(x, y, width, unbiased) for width in widths]).mean(0)


def _mmd(x: Tensor, y: Tensor, width: Tensor | float, unbiased: bool) -> Tensor:
    return (
        _mean_within(gaussian_kernel(x, x, width), unbiased)
        + _mean_within(gaussian_kernel(y, y, width), unbiased)
        - 2 * gaussian_kernel(x, y, width).mean((-2, -1))
    )


def _mean_within(k: Tensor, unbiased: bool) -> Tensor:
    if not unbiased:
        return k.mean((-2, -1))
    return (k.sum((-2, -1)) - k.diagonal(dim1=-2, dim2=-1).sum(-1)) / (k.shape[-1] * (k.shape[-1] - 1))


def _check_sets(x: Tensor, y: Tensor, least: int) -> None:
    check_rows("x", x, least)
    check_rows("y", y, least)
    if x.shape[-1] != y.shape[-1]:
        raise InvalidInput(f"x has rows of {x.shape[-1]} values and y of {y.shape[-1]}; expected equal widths")


def _check_pairs(x: Tensor, z: Tensor, least: int) -> None:
    check_rows("x", x, least)
    check_rows("z", z, least)
    if x.shape[:-1] != z.shape[:-1]:
        raise InvalidInput(
            f"x has {tuple(x.shape[:-1])} rows and z has {tuple(z.shape[:-1])} rows; expected pairs of rows"
        )


def _kernel(x: Tensor, kernel: Kernel) -> Tensor:
    check_names("kernel", get_args(Kernel), kernel)
    if kernel == "gaussian":
        return gaussian_kernel(x, x, median_bandwidth(x))
    # The mean row cancels in every centred product; without it no digits are lost far from the origin.
    rows = x - x.mean(-2, keepdim=True)
    return linear_kernel(rows, rows)


def _centered(k: Tensor) -> Tensor:
    return k - k.mean(-1, keepdim=True) - k.mean(-2, keepdim=True) + k.mean((-2, -1), keepdim=True)


def _unit(x: Tensor, kernel: Kernel) -> Tensor:
    """Return the centred kernel matrix scaled to norm 1; zeros if `x` is constant up to rounding."""
    k = _centered(_kernel(x, kernel))
    norm = torch.linalg.matrix_norm(k)
    rounding = 64 * torch.finfo(x.dtype).eps
    floor = rounding**2 * x.square().sum((-2, -1)) if kernel == "linear" else rounding * x.shape[-2]
    return k.div(norm.masked_fill(norm <= floor, torch.inf)[..., None, None])


def _unbiased(kx: Tensor, kz: Tensor) -> Tensor:
    n = kx.shape[-1]
    off = 1 - torch.eye(n, dtype=kx.dtype, device=kx.device)
    kx, kz = kx * off, kz * off
    rows = kx.sum(-1) * kz.sum(-1)
    whole = kx.sum((-2, -1)) * kz.sum((-2, -1)) / ((n - 1) * (n - 2))
    return ((kx * kz).sum((-2, -1)) + whole - 2 / (n - 2) * rows.sum(-1)) / (n * (n - 3))
