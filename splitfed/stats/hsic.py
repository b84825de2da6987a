"""HSIC: a measure of dependence between two sets of vectors by Gaussian kernels, and its scale-free form, CKA.

Papers: Gretton, Bousquet, Smola, Schölkopf, "Measuring statistical dependence with Hilbert-Schmidt norms", ALT 2005
(the biased form); Song, Smola, Gretton, Bedo, Borgwardt, "Feature selection via dependence maximization", Journal of
Machine Learning Research 2012 (the unbiased one); Kornblith, Norouzi, Lee, Hinton, "Similarity of neural network
representations revisited", ICML 2019 (CKA).

Arguments are tensors (n, ...) of n paired observations, flattened. The kernel is exp(-|p - q|² / (2 s²)), s² half the
median of the squared distances of pairs that differ, so that neither argument's unit matters. With K, L the kernel
matrices, K~ and L~ the same with zero diagonals, the unbiased form, which is of either sign, is

    [tr(K~L~) + (1'K~1)(1'L~1)/((n-1)(n-2)) - 2/(n-2) 1'K~L~1] / (n(n-3)).

As with distance correlation, the biased form tr(KHLH)/(n-1)², H = I - 1/n, is far from 0 for independent images of a
small batch, so only the unbiased one is computed here. Where an argument is constant it is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count
from splitfed.stats.dependence import PermutationTest

LEAST = 4


@torch.no_grad()
def permutation_test_hsic(x: Tensor, z: Tensor, permutations: int, generator: torch.Generator) -> PermutationTest:
    """Test independence: the unbiased CKA against its values when the rows of `z` are shuffled.

    p = (1 + number of shuffles that reach the statistic) / (1 + permutations), so it is never 0. Raises `InvalidInput`
    for fewer than 4 rows and for values that are not finite.
    """
    check_count("permutations", permutations, low=1)
    k, level = (_off_diagonal(part) for part in _kernels(x, z))
    own = _unbiased(k, k)
    value = _alignment(k, level, own)
    null = []
    for _ in range(permutations):
        order = torch.randperm(len(k), generator=generator, device=generator.device).to(k.device)
        null.append(_alignment(k, level[order][:, order], own))
    drawn = torch.stack(null)
    # Shuffles that only swap equal rows tie with the statistic, up to rounding: they count as reaching it.
    reached = int((drawn >= value - 1e-12).sum())
    return PermutationTest(float(value), drawn.cpu(), (1 + reached) / (1 + permutations))


def _kernels(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Check a pair, and return both kernel matrices (n, n), float64."""
    if len(x) != len(z) or len(x) < LEAST:
        raise InvalidInput(f"x has {len(x)} rows and z has {len(z)}; expected equal numbers, at least {LEAST}")
    for name, value in (("x", x), ("z", z)):
        if not bool(torch.isfinite(value).all()):
            raise InvalidInput(f"{name} holds a value that is not finite; expected finite numbers")
    return _kernel(x.detach()), _kernel(z.detach())


def _kernel(x: Tensor) -> Tensor:
    rows = x.double().flatten(1)
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    apart = distances[distances > 0]
    if len(apart) == 0:
        return torch.ones_like(distances)
    # exp(-|p - q|² / (2 s²)), s² = median / 2
    return torch.exp(-distances / float(apart.median()))


def _off_diagonal(k: Tensor) -> Tensor:
    return k - torch.diag(k.diagonal())


def _unbiased(k: Tensor, level: Tensor) -> Tensor:
    """Return the unbiased HSIC of two kernel matrices with zero diagonals."""
    n = len(k)
    rows, columns = k.sum(1), level.sum(1)
    total = (k * level).sum() + rows.sum() * columns.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * rows @ columns
    return total / (n * (n - 3))


def _alignment(k: Tensor, level: Tensor, own: Tensor) -> Tensor:
    """Return the alignment of two kernel matrices with zero diagonals; `own`: the unbiased HSIC of `k` and `k`."""
    other = _unbiased(level, level)
    # Of a constant argument all entries are 1: what is left is rounding.
    if min(float(own), float(other)) <= 1e-12:
        return torch.zeros((), dtype=k.dtype)
    return _unbiased(k, level) / (own * other).sqrt()
