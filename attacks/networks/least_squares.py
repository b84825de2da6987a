"""Least squares from releases to rows: a dense linear inverse, or a convolutional one with one kernel for all places.

Paper: none; ridge regression.

The ridge is chosen on a held-out fifth of the rows; the weights are then solved for all rows. Sums and solution are in
double precision: the inverse of a convolution is badly conditioned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.networks.image_parts import doublings
from splitfed.core.rows import flat_rows

RIDGES = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2)
"""Candidate ridges, as multiples of the mean variance of a feature."""

KERNELS = (7, 5, 3, 1)
MOST_FEATURES = 1024  # of a row, and half as many of a place: their products take a second or two of one core
MOST_NUMBERS = 16_384  # of a release, which may be more than the features they are mixed to
MOST_PLACES = 50_000  # of an image, over all rows: a few thousand decide what a small kernel can be

Pairs = Iterable[tuple[Tensor, Tensor]]


class _Solution(NamedTuple):
    """`weight` (features, targets), `bias` (targets,), and the mean squared error on held-out rows."""

    weight: Tensor
    bias: Tensor
    error: float


class Dense(nn.Module):
    """Affine map from (n, ...) to (n, *target); `weight`: (numbers, targets)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, target: tuple[int, ...], weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self._target = target
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias.float())

    def forward(self, z: Tensor) -> Tensor:
        """Return the affine map of the flattened z (n, ...): (n, *target), float32."""
        return (flat_rows(z) @ self.weight + self.bias).view(-1, *self._target)


class Local(nn.Module):
    """Maps (n, channels, h, w) to images (n, *target) by one kernel for all places.

    Each place of the grid predicts a block of pixels, whose side is 2 to the number of doublings from grid to image.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, grid: tuple[int, int], target: tuple[int, int, int], kernel: int) -> None:
        super().__init__()
        self._target, self._kernel = target, kernel
        (n, self._rows), (m, self._columns) = (doublings(*pair) for pair in zip(grid, target[1:], strict=True))
        self._block = (2**n, 2**m)
        gaps = (self._rows - grid[0], self._columns - grid[1])
        # The grid stands in the middle: a valid convolution takes as much from every side.
        self._padding = [side + kernel // 2 for gap in reversed(gaps) for side in (gap // 2, gap - gap // 2)]

    def fit(self, weight: Tensor, bias: Tensor) -> Local:
        """Set the weights: (channels * kernel * kernel, numbers of a block), (numbers of a block,)."""
        size = self._kernel
        self.register_buffer("weight", weight.T.reshape(len(bias), -1, size, size).float().contiguous())
        self.register_buffer("bias", bias.float())
        return self

    def features(self, z: Tensor) -> Tensor:
        """Return the patch of z around every place of the grid: (n * places, channels * kernel * kernel)."""
        return functional.unfold(functional.pad(z, self._padding), self._kernel).transpose(1, 2).flatten(0, 1)

    def blocks(self, x: Tensor) -> Tensor:
        """Return the block of pixels of x (n, channels, h, w) at every place: (n * places, numbers of a block)."""
        high, wide = self._rows * self._block[0] - x.shape[2], self._columns * self._block[1] - x.shape[3]
        x = functional.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2], mode="replicate")
        return functional.unfold(x, self._block, stride=self._block).transpose(1, 2).flatten(0, 1)

    def forward(self, z: Tensor) -> Tensor:
        """Return the images (n, *target) of z (n, channels, h, w)."""
        found = functional.conv2d(functional.pad(z, self._padding), self.weight, self.bias)
        size = (self._rows * self._block[0], self._columns * self._block[1])
        x = functional.fold(found.flatten(2), size, self._block, stride=self._block)
        top, left = ((whole - goal) // 2 for whole, goal in zip(size, self._target[1:], strict=True))
        return x[..., top : top + self._target[1], left : left + self._target[2]]


def linear_inverse(passes: Sequence[Tensor], x: Tensor) -> nn.Module | None:
    """Return the linear map from releases to rows with the least held-out error; None if all have too many weights.

    A convolutional map is preferred to a dense one of up to half its error. passes: releases of the same rows, each (n,
    ...), drawn afresh by a random defense; x: (n, ...), n >= 5.
    """
    z = passes[0]
    if all(torch.equal(z, other) for other in passes[1:]):
        passes = passes[:1]
    solutions: list[tuple[float, nn.Module]] = []
    if z[0].numel() <= MOST_NUMBERS:
        mixed = _mixing(z[0].numel(), z.device)
        solved = _ridge(lambda rows: ((flat_rows(z[rows]) @ mixed, x[rows].flatten(1)) for z in passes), len(x))
        solutions.append((solved.error, Dense(tuple(x.shape[1:]), mixed.double() @ solved.weight, solved.bias)))
    if (local := _local(z.shape[1:], x.shape[1:])) is not None:
        count = min(len(x), max(50, MOST_PLACES * x.shape[1] // prod(x.shape[1:])))
        solved = _ridge(lambda rows: _patch_pairs(local, passes, x, rows), count)
        # It has few weights for many places, so what it leaves of these very rows is what it leaves of others, and a
        # network that learns from that gains more. The whole row at once must be much better to be preferred.
        solutions.append((solved.error / 2, local.fit(solved.weight, solved.bias)))
    return min(solutions, key=lambda pair: pair[0])[1] if solutions else None


def _local(source: Sequence[int], target: Sequence[int]) -> Local | None:
    """Return a convolutional map with the largest kernel that has few enough weights; None if there is none."""
    images = len(source) == len(target) == 3 and min(source[1:]) >= 2
    if not images or any(size > goal for size, goal in zip(source[1:], target[1:], strict=True)):
        return None
    kernel = next((k for k in KERNELS if 2 * source[0] * k * k <= MOST_FEATURES), None)
    return None if kernel is None else Local((source[1], source[2]), (target[0], target[1], target[2]), kernel)


def _mixing(numbers: int, device: torch.device) -> Tensor:
    """Return the matrix from a release to features: the identity, or random mixtures if there are too many numbers.

    A linear function of fewer inputs than mixtures can be inverted from the mixtures as well as from all numbers.
    """
    if numbers <= MOST_FEATURES:
        return torch.eye(numbers, device=device)
    drawn = torch.Generator().manual_seed(numbers)
    return (torch.randn(numbers, MOST_FEATURES, generator=drawn) / sqrt(numbers)).to(device)


def _patch_pairs(local: Local, passes: Sequence[Tensor], x: Tensor, rows: Tensor) -> Pairs:
    for i, few in enumerate(rows.split(16)):
        # Every few rows one pass: more rows say more than more draws for the same ones.
        yield local.features(passes[i % len(passes)][few]), local.blocks(x[few])


def _ridge(pairs: Callable[[Tensor], Pairs], count: int) -> _Solution:
    """Return the ridge regression over the first `count` rows; `pairs` maps row numbers to features and targets."""
    aside = max(count // 5, 1)
    first, rest = (_Sums(pairs(rows)) for rows in torch.arange(count).split([count - aside, aside]))
    error, ridge = min((rest.error(*first.solve(ridge)), ridge) for ridge in (*RIDGES, float("inf")))
    return _Solution(*(first + rest).solve(ridge), error)


class _Sums:
    """Sums of products over pairs of features (n, k) and targets (n, t)."""

    def __init__(self, pairs: Pairs) -> None:
        self.count = 0
        self.parts: list[Tensor] = []
        self._spectrum: tuple[Tensor, Tensor] | None = None
        for a, b in pairs:
            one = torch.ones(len(a), 1, dtype=torch.float64, device=a.device)
            a, b = torch.cat([a.double(), one], 1), b.double()
            found = [a.T @ a, a.T @ b, b.square().sum()]
            self.parts = [s + f for s, f in zip(self.parts, found, strict=True)] if self.parts else found
            self.count += len(a)

    def __add__(self, other: _Sums) -> _Sums:
        both = _Sums(())
        both.count = self.count + other.count
        both.parts = [a + b for a, b in zip(self.parts, other.parts, strict=True)]
        return both

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return weight (k, t) and bias (t,); for an infinite ridge the bias is the mean target and the weight 0."""
        gram, cross, _ = self.parts
        a, b = gram[-1, :-1] / self.count, cross[-1] / self.count
        centred = cross[:-1] - self.count * a.outer(b)
        if ridge == float("inf"):
            return torch.zeros_like(centred), b
        if self._spectrum is None:
            self._spectrum = torch.linalg.eigh(gram[:-1, :-1] - self.count * a.outer(a))
        values, vectors = self._spectrum
        # A feature that never varies has no weight, whatever rounding makes of its variance.
        values = values.clamp_min(0) + max(ridge * float(values.mean()), 1e-300)
        weight = vectors @ ((vectors.T @ centred) / values[:, None])
        return weight, b - a @ weight

    def error(self, weight: Tensor, bias: Tensor) -> float:
        """Return the mean squared error of a solution over these pairs."""
        gram, cross, square = self.parts
        found = torch.cat([weight, bias[None]])
        total = square - 2 * (found * cross).sum() + (found * (gram @ found)).sum()
        return float(total) / (self.count * len(bias))
