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
wide rows, and take two rows closer than about .002 of their distance to the mean for equal rows (.01 where wide
rows have a mean 5.5 times as long as that distance; a longer one is taken out first). NaN in, NaN out. Halves are
computed in float32, whole numbers in float64, and both in float64 if one is. Gradients are of first order only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from splitfed.errors import InvalidInput, check_count, unknown

Statistic = Literal["u_distance_correlation_sqr", "distance_correlation_sqr", "distance_correlation"]
Array = Any  # a tensor, or a NumPy array
Number = Any  # a float, or a tensor of one number
Centering = Callable[[Array], tuple[Array, Array]]

_GRAM_ERROR = 16  # relative error of a squared Gram distance, in units of float eps
_FAR = 32  # squared distance to the origin, in units of that to the mean, from which the mean is taken out
_WIDE = 1 << 15  # numbers up to which it is taken out at once
_CENTERING_ERROR = 64  # relative error of a centred distance, in units of float eps
_EPS = {kind: torch.finfo(kind).eps for kind in (torch.float32, torch.float64)}
_SMALL = 512  # rows up to which NumPy, on its one thread, is faster than torch on the CPU
_CHUNK = 1 << 22  # permuted distances held at a time


class Form(NamedTuple):
    """Which statistic: how distances are centred, whether the matrices are scaled to norm 1, whether a root is taken.

    Without the scaling it is a mean over the n² pairs. `least`: the rows that it needs.
    """

    center: Centering
    unit: bool = True
    root: bool = False
    least: int = 1


class PermutationTest(NamedTuple):
    """Statistic of the given pairing, its null (permutations,) on the CPU, and the one-sided p-value in (0, 1]."""

    statistic: float
    null: Tensor
    p_value: float


def distance_covariance_sqr(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased squared distance covariance, a scalar >= 0 in units of x times units of z."""
    return _product(x, z, Form(_doubly_centered, unit=False))


def distance_correlation_sqr(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased squared distance correlation dCov² / sqrt(dVar_x dVar_z), a scalar in [0, 1].

    Differentiable in both arguments; an argument that needs no gradient costs no backward pass.
    """
    return _product(x, z, _FORMS["distance_correlation_sqr"])


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    """Return the biased distance correlation, a scalar in [0, 1]: the root of `distance_correlation_sqr`."""
    return _product(x, z, _FORMS["distance_correlation"])


def u_distance_correlation_sqr(x: Tensor, z: Tensor) -> Tensor:
    """Return the bias-corrected squared distance correlation, a scalar in [-1, 1], about 0 if independent.

    Signed, so no root is taken. Raises `InvalidInput` for fewer than 4 rows.
    """
    return _product(x, z, _FORMS["u_distance_correlation_sqr"])


def slope(x: Tensor, z: Tensor, statistic: Statistic, factor: float = 1.0) -> Tensor:
    """Return `factor` times the gradient of `statistic` in `z`: what autograd finds, at less cost.

    In the shape and type of `z`, attached to no graph.
    """
    form = _FORMS[statistic]
    _, (weights,), (_, rows) = _evaluated(*_rows(x.detach(), z.detach(), form.least), form, (1,), factor=factor)
    found = _matmul(weights if isinstance(weights, Tensor) else torch.from_numpy(weights), rows).view_as(z)
    return found if found.dtype == z.dtype else found.to(z.dtype)


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
    form = _FORMS[statistic]
    distances, _ = _distances(*_rows(x.double(), z.double(), form.least))
    n, dtype = distances.shape[-1], distances.dtype
    centered, means = form.center(distances)
    u, v = (m * _to_unit((m * m).sum(), n * mean, dtype) for m, mean in zip(centered, means, strict=True))
    n, device = len(u), generator.device
    orders = [torch.randperm(n, generator=generator, device=device) for _ in range(permutations)]
    # Centring commutes with shuffling, and the norms stay: only the product is taken again.
    parts = torch.stack(orders).to(u.device).split(max(1, _CHUNK // n**2))
    null = torch.cat([(u * v[part[:, :, None], part[:, None, :]]).sum((1, 2)) for part in parts])
    value = (u * v).sum()
    # Shuffles that only swap equal rows tie with the statistic, up to rounding: they count as reaching it.
    reached = int((null >= value - 1e-12).sum())
    if form.root:
        value, null = _root(value, dtype)[0], _root(null, dtype)[0]
    return PermutationTest(float(value), null.cpu(), (1 + reached) / (1 + permutations))


class _Product(torch.autograd.Function):
    """The statistic, with its gradient written by hand and made along with it, while all that it needs is at hand.

    One matrix product each way, far fewer small operations than autograd would record, and both matrices in one
    array, so that what is small is done for both at once; for few rows of float32 on the CPU by NumPy, whose calls cost
    a fraction of torch's. Wide rows are kept as they came: who changes them before the way back gets autograd's error.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, form: Form) -> Tensor:
        ctx.wanted = [side for side in (0, 1) if ctx.needs_input_grad[side]]
        value, weights, rows = _evaluated(x, z, form, ctx.wanted)
        if not isinstance(value, Tensor):
            value, weights = torch.tensor(value, dtype=x.dtype, device=x.device), [torch.from_numpy(w) for w in weights]
        ctx.save_for_backward(*weights, *(rows[side] for side in ctx.wanted))
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        saved, many = ctx.saved_tensors, len(ctx.wanted)
        found: dict[int, Tensor] = {}
        for side, weights, rows in zip(ctx.wanted, saved[:many], saved[many:], strict=True):
            found[side] = _matmul(weights * gradient, rows)
        return found.get(0), found.get(1), None


class _Stackable(torch.autograd.Function):
    """The same for the transforms of `torch.func`, in the form that they ask for; several times the fixed cost."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, z: Tensor, form: Form) -> tuple[Tensor, ...]:
        value, weights, rows = _evaluated(x, z, form, (0, 1), short=False)
        return value, *weights, *rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights_x, weights_z, rows_x, rows_z = ctx.saved_tensors
        return _matmul(weights_x * gradient, rows_x), _matmul(weights_z * gradient, rows_z), None


def _evaluated(
    x: Tensor, z: Tensor, form: Form, wanted: Sequence[int], short: bool = True, factor: float = 1.0
) -> tuple[Number, list[Array], Sequence[Tensor]]:
    """Return the statistic, and of each of the `wanted` sides what times its rows is the gradient; then all rows.

    With the scaled matrices A and B it is their inner product. Its slope in A is B, or, with A at norm 1, what
    of B is orthogonal to A; a root multiplies that by its own. `factor` multiplies the gradients alone. `short`: value
    and gradients are NumPy's where that is shorter.
    """
    with np.errstate(all="ignore"):
        distances, rows = (_distances_in_numpy(x, z) if short else None) or _distances(x, z)
        centered, means = form.center(distances)
        n, product = distances.shape[-1], (centered[0] * centered[1]).sum()
        factors: list[Number] = [1 / n, 1 / n]
        if form.unit:
            squares = (centered * centered).sum((-2, -1))
            if isinstance(distances, np.ndarray):
                product, squares, means = float(product), squares.tolist(), means.tolist()
            factors = [_to_unit(square, n * mean, x.dtype) for square, mean in zip(squares, means, strict=True)]
        inner = product * factors[0] * factors[1]
        value, rise = _root(inner, x.dtype) if form.root else (inner, 1.0)
        weights = []
        for own in wanted:
            # Both centrings are orthogonal projections, so they leave the gradients as they are.
            direction = centered[1 - own] * factors[1 - own]
            if form.unit:
                direction -= centered[own] * (inner * factors[own])
            weights.append(_laplacian(direction, distances[own], -2 * factor * rise * factors[own]))
    return value, weights, rows


def _product(x: Tensor, z: Tensor, form: Form) -> Tensor:
    if not torch.is_grad_enabled():
        # Otherwise the gradient would be made along with the value.
        x, z = x.detach(), z.detach()
    given = (*_rows(x, z, form.least), form)
    try:
        value: Tensor = _Product.apply(*given)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # Inside a transform of torch.func; any other error comes again.
        value = _Stackable.apply(*given)[0]  # type: ignore[no-untyped-call]
    return value


def _rows(x: Tensor, z: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Check the pair and return both as (n, d) in float32 or float64."""
    for name, value in (("x", x), ("z", z)):
        if 0 in (value.dim(), value.numel()) or value.is_complex():
            raise InvalidInput(f"{name} is {value.dtype} of shape {tuple(value.shape)}; expected real (n, ...)")
    n = x.shape[0]
    if n != z.shape[0] or n < least:
        raise InvalidInput(f"x has {n} rows and z has {len(z)}; expected equal numbers, at least {least}")
    if x.device != z.device:
        raise InvalidInput(f"x is on {x.device} and z on {z.device}; expected one device")
    # What is as it should be stays as it is: a view of it would be a step more on the way back.
    x, z = (t if t.dim() == 2 else t.reshape(n, -1) for t in (x, z))
    if x.dtype == z.dtype == torch.float32:
        return x, z
    exact = any(t.dtype == torch.float64 or not t.is_floating_point() for t in (x, z))
    wanted = torch.float64 if exact else torch.float32
    return x.to(wanted), z.to(wanted)


def _distances(x: Tensor, z: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """(n, d) and (n, e) -> Euclidean distances (2, n, n), and the rows of both less their mean."""
    # Far from the origin a Gram matrix would lose every digit: the mean goes first.
    rows = [part - part.mean(0) for part in (x, z)]
    if x.dtype == torch.float64:
        both = [torch.cdist(part, part, compute_mode="donot_use_mm_for_euclid_dist") for part in rows]
        return torch.stack(both), rows
    return _from_grams(torch.stack([_matmul(part, part.T) for part in rows]), x.dtype) ** 0.5, rows


def _distances_in_numpy(x: Tensor, z: Tensor) -> tuple[Array, Sequence[Tensor]] | None:
    """The same of few rows of float32 on the CPU; None where NumPy would take longer or lose digits.

    The mean of wide rows stays in: to take it out costs as much as all that is small.
    """
    n = x.shape[0]
    if n > _SMALL or x.dtype != torch.float32 or not x.is_cpu:
        return None
    rows = [part if part.numel() > _WIDE else part - part.mean(0) for part in (x, z)]
    products = np.array([_matmul(part, part.T).numpy() for part in rows])
    squared = _from_grams(products, x.dtype)
    sums = squared.sum(2) / n
    spreads = sums - sums.mean(1)[:, None] / 2
    # A row is as good as its own distances to origin and mean compare. Of what is not finite nothing is true.
    near = products.diagonal(0, 1, 2) <= _FAR * spreads
    return (squared**0.5, rows) if near.all() else None


def _from_grams(products: Array, dtype: torch.dtype) -> Array:
    """Return the squared distances of the rows whose inner products these are, (2, n, n)."""
    norms = products.diagonal(0, 1, 2)
    norms = norms[:, :, None] + norms[:, None, :]
    squared = norms - 2 * products
    squared *= squared > norms * (_GRAM_ERROR * _EPS[dtype])
    return squared


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, in their own precision."""
    if not torch.is_autocast_enabled(a.device.type):
        return a @ b
    # It would be taken in half precision, where differences are noise.
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _laplacian(direction: Array, distances: Array, factor: Number) -> Array:
    """Take a gradient back from distances: what times the rows is theirs. The slope is 0 where a distance is 0."""
    weights = direction * (distances > 0) / (distances + (distances == 0)) * factor
    sums, n = weights.sum(1), len(weights)
    if isinstance(weights, Tensor):
        weights.diagonal().sub_(sums)
    else:
        weights.reshape(-1)[:: n + 1] -= sums
    return weights


def _doubly_centered(distances: Array) -> tuple[Array, Array]:
    """Return the centred matrices and the mean of each before."""
    n = distances.shape[-1]
    means = distances.sum(-1) / n
    mean = means.sum(-1) / n
    return distances - means[:, :, None] - (means - mean[:, None])[:, None, :], mean


def _u_centered(distances: Array) -> tuple[Array, Array]:
    """Return the centred matrices and the mean of each before."""
    n = distances.shape[-1]
    sums = distances.sum(-1)
    pairs, total = (sums[:, :, None] + sums[:, None, :]) / (n - 2), sums.sum(-1)
    centered = distances - pairs + (total / ((n - 1) * (n - 2)))[:, None, None]
    tensor = isinstance(centered, Tensor)
    one = torch.eye(n, dtype=centered.dtype, device=centered.device) if tensor else np.eye(n, dtype=centered.dtype)
    return centered * (1 - one), total / n**2


def _to_unit(squared_norm: Number, size: Number, dtype: torch.dtype) -> Number:
    """Return what scales a centred matrix to norm 1: 0 where its norm is 0 up to rounding of distances of `size`."""
    norm = squared_norm**0.5
    return 1 / _where(norm <= size * (_CENTERING_ERROR * _EPS[dtype]), math.inf, norm)


def _root(squared: Number, dtype: torch.dtype) -> tuple[Number, Number]:
    """Return the root and its slope, both 0 where `squared` is zero up to rounding."""
    low = squared <= 4 * _EPS[dtype]
    root = _where(low, math.inf, squared) ** 0.5
    return _where(low, 0.0, root), 0.5 / root


def _where(condition: Any, yes: float, no: Number) -> Number:
    if isinstance(no, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


_FORMS: dict[Statistic, Form] = {
    "u_distance_correlation_sqr": Form(_u_centered, least=4),
    "distance_correlation_sqr": Form(_doubly_centered),
    "distance_correlation": Form(_doubly_centered, root=True),
}
