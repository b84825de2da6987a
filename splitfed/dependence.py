"""Distance correlation: how strongly two sets of vectors depend on each other, linearly or not.

Paper: Szekely, Rizzo and Bakirov, "Measuring and testing dependence by correlation of distances", Annals of
Statistics 2007; the bias-corrected form from Szekely and Rizzo, "Partial distance correlation with methods for
dissimilarities", Annals of Statistics 2014.

Every argument is a tensor (n, ...) of n paired observations, flattened to (n, d). Distances are Euclidean, not
squared. Both correlations are the cosine between two centred distance matrices, and differ in the centring only.

Train with the biased form if you like, but report `u_distance_correlation_sqr` with `permutation_test`: on a
batch of images the biased form is near 1 even for independent data (784 against 500 wide: .99 at n = 32).

Deviations: where a denominator is zero up to rounding (a constant argument) the value is 0 and so is the
gradient; a biased squared correlation within rounding of zero is 0, because the slope of its root is infinite
there. float64 distances are exact to rounding; float32 ones come from one Gram matrix, which is an order of
magnitude faster, and take two rows closer than about .002 of their distance to the mean for equal rows. NaN in,
NaN out. Halves are computed in float32, whole numbers in float64. Gradients are first order only: both backward
passes are written by hand, with half the operations that autograd would record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from splitfed.errors import InvalidInput, check_count, unknown

Statistic = Literal["u_distance_correlation_sqr", "distance_correlation_sqr", "distance_correlation"]
Centering = Callable[[Tensor], Tensor]

_GRAM_ERROR = 16  # relative error of a squared Gram distance, in units of float eps
_CENTERING_ERROR = 64  # relative error of a centred distance, in units of float eps
_CHUNK = 1 << 22  # permuted distances held at a time


class PermutationTest(NamedTuple):
    """Statistic of the given pairing, its null (permutations,) on the CPU, and the one-sided p-value in (0, 1]."""

    statistic: float
    null: Tensor
    p_value: float


def distance_covariance_sqr(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased squared distance covariance, a scalar >= 0 in units of x times units of z."""
    a, b = _distances(x, z)
    return (_doubly_centered(a) * _doubly_centered(b)).mean()


def distance_correlation_sqr(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased squared distance correlation dCov² / sqrt(dVar_x dVar_z), a scalar in [0, 1].

    Differentiable in both arguments; an argument that needs no gradient costs no backward pass.
    """
    return _cosine(*_distances(x, z), _doubly_centered)


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased distance correlation, a scalar in [0, 1]: the root of `distance_correlation_sqr`."""
    return _root(distance_correlation_sqr(x, z))


def u_distance_correlation_sqr(x: Tensor, z: Tensor) -> Tensor:
    """Return the bias-corrected squared distance correlation, a scalar in [-1, 1], about 0 if independent.

    Signed, so no root is taken. Raises `InvalidInput` for fewer than 4 rows.
    """
    return _cosine(*_distances(x, z, least=4), _u_centered)


@torch.no_grad()
def permutation_test(
    x: Tensor,
    z: Tensor,
    permutations: int,
    generator: torch.Generator,
    statistic: Statistic = "u_distance_correlation_sqr",
) -> PermutationTest:
    """Test independence of `x` and `z`: the statistic against its values when the rows of `z` are shuffled.

    p = (1 + number of shuffles that reach the statistic) / (1 + permutations), so it is never 0. Computed in
    float64; distances cost n² d, once. Raises `InvalidInput` for values that are not finite.
    """
    check_count("permutations", permutations, low=1)
    if statistic not in get_args(Statistic):
        raise unknown("statistic", statistic, get_args(Statistic))
    for name, value in (("x", x), ("z", z)):
        if not bool(torch.isfinite(value).all()):
            raise InvalidInput(f"{name} holds a value that is not finite; expected finite numbers")
    unbiased = statistic == "u_distance_correlation_sqr"
    a, b = _distances(x.double(), z.double(), least=4 if unbiased else 1)
    center = _u_centered if unbiased else _doubly_centered
    u, v = _unit(a, center)[0], _unit(b, center)[0]
    n, device = len(u), generator.device
    orders = [torch.randperm(n, generator=generator, device=device) for _ in range(permutations)]
    # Centring commutes with shuffling, and the norms stay: only the product is taken again.
    parts = torch.stack(orders).to(u.device).split(max(1, _CHUNK // n**2))
    null = torch.cat([(u * v[part[:, :, None], part[:, None, :]]).sum((1, 2)) for part in parts])
    value = (u * v).sum()
    # Shuffles that only swap equal rows tie with the statistic, up to rounding: they count as reaching it.
    reached = int((null >= value - 1e-12).sum())
    if statistic == "distance_correlation":
        value, null = _root(value), _root(null)
    return PermutationTest(float(value), null.cpu(), (1 + reached) / (1 + permutations))


class _PairwiseDistance(torch.autograd.Function):
    """(n, d) -> (n, n) Euclidean distances, slope 0 where a distance is 0; one matrix product each way."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        # Far from the origin the Gram matrix would lose every digit: the mean goes first.
        centered = x - x.mean(0)
        if x.dtype == torch.float64:
            return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"), centered
        gram = centered @ centered.T
        norms = gram.diagonal()
        norms = norms[:, None] + norms
        squared = torch.sub(norms, gram, alpha=2)
        return squared.masked_fill_(squared <= _GRAM_ERROR * torch.finfo(x.dtype).eps * norms, 0).sqrt_(), centered

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        distances, centered = ctx.saved_tensors
        weights = (gradient + gradient.T).div_(distances.masked_fill(distances == 0, torch.inf))
        product: Tensor = (torch.diag(weights.sum(1)) - weights) @ centered
        return product


class _Cosine(torch.autograd.Function):
    """Cosine of two distance matrices after centring; the other outputs are kept for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, center: Centering) -> tuple[Tensor, ...]:
        (u, per_a), (v, per_b) = _unit(a, center), _unit(b, center)
        return (u * v).sum(), u, v, per_a, per_b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # Both centrings are orthogonal projections, so they leave the gradient as it is.
        value, u, v, per_a, per_b = ctx.saved_tensors
        needs_a, needs_b, _ = ctx.needs_input_grad
        grad_a = (v - value * u) * (gradient * per_a) if needs_a else None
        grad_b = (u - value * v) * (gradient * per_b) if needs_b else None
        return grad_a, grad_b, None


def _distances(x: Tensor, z: Tensor, least: int = 1) -> tuple[Tensor, Tensor]:
    """Check the pair and return both distance matrices."""
    for name, value in (("x", x), ("z", z)):
        if value.dim() == 0 or value.numel() == 0 or value.is_complex():
            raise InvalidInput(f"{name} is {value.dtype} of shape {tuple(value.shape)}; expected real (n, ...)")
    if len(x) != len(z) or len(x) < least:
        raise InvalidInput(f"x has {len(x)} rows and z has {len(z)}; expected equal numbers, at least {least}")
    if x.device != z.device:
        raise InvalidInput(f"x is on {x.device} and z on {z.device}; expected one device")
    # Autocast would take the Gram matrix in half precision, where its differences are noise.
    with torch.autocast(x.device.type, enabled=False):
        return _distance(x), _distance(z)


def _distance(x: Tensor) -> Tensor:
    exact = x.dtype == torch.float64 or not x.is_floating_point()
    rows = (x if x.dim() > 1 else x[:, None]).flatten(1).to(torch.float64 if exact else torch.float32)
    distances: Tensor = _PairwiseDistance.apply(rows)[0]  # type: ignore[no-untyped-call]
    return distances


def _doubly_centered(distances: Tensor) -> Tensor:
    means = distances.mean(0)
    return distances - means - means[:, None] + means.mean()


def _u_centered(distances: Tensor) -> Tensor:
    n = len(distances)
    sums = distances.sum(0)
    centered = distances - (sums + sums[:, None]) / (n - 2) + sums.sum() / ((n - 1) * (n - 2))
    return centered.masked_fill(torch.eye(n, dtype=torch.bool, device=distances.device), 0)


def _unit(distances: Tensor, center: Centering) -> tuple[Tensor, Tensor]:
    """Return the centred matrix scaled to norm 1, and the scale; both 0 if the norm is 0 up to rounding."""
    centered = center(distances)
    norm = torch.linalg.vector_norm(centered)
    floor = _CENTERING_ERROR * torch.finfo(distances.dtype).eps * torch.linalg.vector_norm(distances)
    scale = norm.reciprocal().masked_fill(norm <= floor, 0)
    return centered * scale, scale


def _cosine(a: Tensor, b: Tensor, center: Centering) -> Tensor:
    value: Tensor = _Cosine.apply(a, b, center)[0]  # type: ignore[no-untyped-call]
    return value


def _root(squared: Tensor) -> Tensor:
    """Return the root, with value and slope 0 where `squared` is zero up to rounding."""
    least = 4 * torch.finfo(squared.dtype).eps
    return squared.clamp_min(least).sqrt() * (squared > least)
