"""Distance correlation: how strongly two sets of vectors depend on each other, linearly or not.

Paper: Szekely, Rizzo and Bakirov, "Measuring and testing dependence by correlation of distances", Annals of
Statistics 2007; the bias-corrected form from Szekely and Rizzo, "Partial distance correlation with methods for
dissimilarities", Annals of Statistics 2014.

Every argument is a tensor (n, ...) of n paired observations, flattened to (n, d). Distances are Euclidean, not
squared. Both correlations are the cosine between two centred distance matrices, and differ in the centring only.

Train with the biased form if you like, but report `u_distance_correlation_sqr` with `permutation_test`: on a
batch of images the biased form is near 1 even for independent data (784 against 500 wide: .99 at n = 32).

Deviations: where a denominator is zero up to rounding (a constant argument) the value is 0 and so is the
gradient; a biased squared correlation within rounding of zero counts as 0, because its root has no finite slope
there. float64 distances are exact to rounding; float32 ones come from one Gram matrix, several times faster on
wide rows, and take two rows closer than about .002 of their distance to the mean for equal rows. NaN in, NaN
out. Halves are computed in float32, whole numbers in float64. Gradients are of first order only.
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
Scaling = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

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
    return _product(x, z, _doubly_centered, _to_mean)


def distance_correlation_sqr(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased squared distance correlation dCov² / sqrt(dVar_x dVar_z), a scalar in [0, 1].

    Differentiable in both arguments; an argument that needs no gradient costs no backward pass.
    """
    return _product(x, z, _doubly_centered, _to_unit)


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased distance correlation, a scalar in [0, 1]: the root of `distance_correlation_sqr`."""
    return _root(distance_correlation_sqr(x, z))


def u_distance_correlation_sqr(x: Tensor, z: Tensor) -> Tensor:
    """Return the bias-corrected squared distance correlation, a scalar in [-1, 1], about 0 if independent.

    Signed, so no root is taken. Raises `InvalidInput` for fewer than 4 rows.
    """
    return _product(x, z, _u_centered, _to_unit, least=4)


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
    center = _u_centered if unbiased else _doubly_centered
    a, b = (_distance(rows)[0] for rows in _rows(x.double(), z.double(), least=4 if unbiased else 1))
    u, v = _to_unit(center(a), a)[0], _to_unit(center(b), b)[0]
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


class _Product(torch.autograd.Function):
    """Inner product of the two scaled matrices; the other outputs are kept for the backward pass.

    Written by hand: one matrix product each way, and far fewer small operations than autograd would record. On
    a batch of 64 images and a release 3136 wide that takes a quarter off the cost of the penalty.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, z: Tensor, center: Centering, scale: Scaling) -> tuple[Tensor, ...]:
        (a, rows_a), (b, rows_b) = _distance(x), _distance(z)
        (u, per_a), (v, per_b) = scale(center(a), a), scale(center(b), b)
        return (u * v).sum(), u, v, per_a, per_b, a, b, rows_a, rows_b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output)
        ctx.radial = inputs[3] is _to_unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        value, u, v, per_a, per_b, a, b, rows_a, rows_b = ctx.saved_tensors
        # Both centrings are orthogonal projections, so they leave the gradients u and v as they are.
        # Scaling to norm 1 takes away the part along the matrix itself.
        inner = value if ctx.radial else 0
        grad_x = _pull(torch.sub(v, inner * u), a, gradient * per_a, rows_a) if ctx.needs_input_grad[0] else None
        grad_z = _pull(torch.sub(u, inner * v), b, gradient * per_b, rows_b) if ctx.needs_input_grad[1] else None
        return grad_x, grad_z, None, None


def _product(x: Tensor, z: Tensor, center: Centering, scale: Scaling, least: int = 1) -> Tensor:
    value: Tensor = _Product.apply(*_rows(x, z, least), center, scale)[0]  # type: ignore[no-untyped-call]
    return value


def _rows(x: Tensor, z: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Check the pair and return both as (n, d) in float32 or float64."""
    for name, value in (("x", x), ("z", z)):
        if value.dim() == 0 or value.numel() == 0 or value.is_complex():
            raise InvalidInput(f"{name} is {value.dtype} of shape {tuple(value.shape)}; expected real (n, ...)")
    if len(x) != len(z) or len(x) < least:
        raise InvalidInput(f"x has {len(x)} rows and z has {len(z)}; expected equal numbers, at least {least}")
    if x.device != z.device:
        raise InvalidInput(f"x is on {x.device} and z on {z.device}; expected one device")
    return _flat(x), _flat(z)


def _flat(x: Tensor) -> Tensor:
    exact = x.dtype == torch.float64 or not x.is_floating_point()
    return x.reshape(len(x), -1).to(torch.float64 if exact else torch.float32)


def _distance(x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, d) -> Euclidean distances (n, n), and the rows less their mean."""
    # Far from the origin the Gram matrix would lose every digit: the mean goes first.
    rows = x - x.mean(0)
    if x.dtype == torch.float64:
        return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"), rows
    # Autocast would take the Gram matrix in half precision, where its differences are noise.
    with torch.autocast(x.device.type, enabled=False):
        gram = rows @ rows.T
    norms = gram.diagonal()
    norms = norms[:, None] + norms
    squared = torch.sub(norms, gram, alpha=2)
    return squared.masked_fill_(squared <= _GRAM_ERROR * torch.finfo(x.dtype).eps * norms, 0).sqrt_(), rows


def _pull(direction: Tensor, distances: Tensor, factor: Tensor, rows: Tensor) -> Tensor:
    """Take a gradient back from distances to rows, with slope 0 where a distance is 0."""
    weights = (direction * (2 * factor)).div_(distances.masked_fill(distances == 0, torch.inf))
    return (torch.diag(weights.sum(1)) - weights) @ rows


def _doubly_centered(distances: Tensor) -> Tensor:
    means = distances.mean(0)
    return distances - means - means[:, None] + means.mean()


def _u_centered(distances: Tensor) -> Tensor:
    n = len(distances)
    sums = distances.sum(0)
    centered = distances - (sums + sums[:, None]) / (n - 2) + sums.sum() / ((n - 1) * (n - 2))
    return centered.masked_fill(torch.eye(n, dtype=torch.bool, device=distances.device), 0)


def _to_unit(centered: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix at norm 1 and the factor applied; both 0 if its norm is 0 up to rounding."""
    norm = torch.linalg.vector_norm(centered)
    floor = _CENTERING_ERROR * torch.finfo(distances.dtype).eps * torch.linalg.vector_norm(distances)
    factor = norm.reciprocal().masked_fill(norm <= floor, 0)
    return centered * factor, factor


def _to_mean(centered: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix over n and the factor 1/n, so that an inner product is a mean over the n² pairs."""
    factor = distances.new_tensor(1 / len(distances))
    return centered * factor, factor


def _root(squared: Tensor) -> Tensor:
    """Return the root, with value and slope 0 where `squared` is zero up to rounding."""
    least = 4 * torch.finfo(squared.dtype).eps
    return squared.clamp_min(least).sqrt() * (squared > least)
