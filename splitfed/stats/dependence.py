"""Distance correlation: a measure of linear and nonlinear dependence between two sets of vectors.

Paper: Szekely, Rizzo and Bakirov, "Measuring and testing dependence by correlation of distances", Annals of Statistics
2007; the bias-corrected form from Szekely and Rizzo, "Partial distance correlation with methods for dissimilarities",
Annals of Statistics 2014.

Every argument is a tensor (n, ...) of n paired observations, flattened to (n, d). Distances are Euclidean, not squared.
Both correlations are the cosine between two centred distance matrices, and differ in the centring only.

Train with the biased form if you like, but report `u_distance_correlation_sqr` with `permutation_test`: on a batch of
images the biased form is near 1 even for independent data (784 against 500 wide: .99 at n = 32).

Deviations: where a denominator is zero up to rounding (a constant argument) the value is 0 and so is the gradient; a
biased squared correlation within rounding of zero counts as 0, because its root has no finite slope there. float64
distances are exact to rounding; float32 ones come from one Gram matrix, several times faster on wide rows, and treat
two rows closer than about .002 of their distance to the mean as equal (wide ones on the CPU closer than .008 of their
mean distance to the others, where they are four times as long as that; where one is longer, the mean is taken out
first). NaN in, NaN out. Half precision is computed in float32, whole numbers in float64, and both arguments in float64
if one is. Gradients are of first order only.

Float32 is used only where a sum is over the width of a row: for the Gram matrix, and not for that of narrow rows on the
CPU. So a squared distance is right to a few 1e-7 of the squared lengths of its two rows (from the origin or from the
mean, as said above), whatever the order in which a processor adds up. All further steps are in float64 and add no
error. U-centring needs it: it subtracts the common part of a row's distances, and if that is 100 000 times the rest,
float32 would keep two digits of the rest. Rows whose squares overflow or underflow float32 are computed in float64
throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from splitfed.core.errors import InvalidInput, check_count, check_kind, check_names, check_number

Statistic = Literal["u_distance_correlation_sqr", "distance_correlation_sqr", "distance_correlation"]
Number = Any  # a float, or a tensor of one number
Numbers = Any  # a list of floats, or a tensor of several
Centering = Callable[[Tensor], tuple[Tensor, Tensor]]

_GRAM_ERROR = 16  # relative error of a squared Gram distance, in units of float eps
_FAR = 16  # squared length of a row, in units of its squared mean distance, from which the mean is taken out
_WIDE = 1 << 14  # numbers up to which it is taken out at once, and all is float64
_CENTERING_ERROR = 64  # relative error of a centred distance, in units of float eps
_LEAST, _MOST = 1e-15, 1e15  # the largest number of float32 rows lies between, or they become float64
_EPS = {kind: torch.finfo(kind).eps for kind in (torch.float32, torch.float64)}
_NO_FLOAT64 = ("mps",)  # devices that have none
_CHUNK = 1 << 22  # permuted distances held at a time


class Form(NamedTuple):
    """A statistic: how distances are centred, whether the matrices are scaled to norm 1, and whether a root is taken.

    Without scaling it is a mean over the n² pairs. `least`: minimum number of rows.
    """

    center: Centering
    unit: bool = True
    root: bool = False
    least: int = 1


class Matrices(NamedTuple):
    """Distances of both sides and their centred form, (2, n, n), the sums of all distances, and the rows (n, d).

    All is float64 except wide rows, and rows of another device. The distance of rows that count as equal, and of a row
    to itself, is stored as infinity, so that it gets no gradient.
    """

    distances: Tensor
    centered: Tensor
    totals: Numbers
    rows: Sequence[Tensor]


class PermutationTest(NamedTuple):
    """Result of a permutation test of independence.

    `statistic`: of the given pairing. `null`: (permutations,) statistics of permuted pairings, on the CPU. `p_value`:
    one-sided, in (0, 1].
    """

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
    """Return `factor` times the gradient of `statistic(x, z)` with respect to `z`, computed in closed form.

    x, z: (n, ...) of n paired rows. The result has the shape and dtype of `z` and is attached to no graph. Cheaper than
    autograd. Raises `InvalidInput` for fewer rows than the statistic needs.
    """
    check_names("statistic", _FORMS, statistic)
    check_number("factor", factor)
    form = _FORMS[statistic]
    left, right = _check_pair(x, z, form.least)
    _, (weights,), (_, rows) = _evaluate_statistic(left.detach(), right.detach(), form, (1,), factor=factor)
    found = _matmul(weights, rows).view_as(z)
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
    check_names("statistic", get_args(Statistic), statistic)
    check_kind("generator", generator, torch.Generator, "a torch.Generator")
    for name, value in (("x", x), ("z", z)):
        check_kind(name, value, Tensor, "a tensor")
        if not bool(torch.isfinite(value).all()):
            raise InvalidInput(f"{name} holds a value that is not finite; expected finite numbers")
    form = _FORMS[statistic]
    matrices = _careful_matrices(*_check_pair(x.double(), z.double(), form.least), form)
    n, dtype, device = len(x), matrices.distances.dtype, generator.device
    u, v = (
        m * _to_unit((m * m).sum(), total / n, dtype)
        for m, total in zip(matrices.centered, matrices.totals, strict=True)
    )
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
    """The statistic with its gradient in closed form, computed in the forward pass.

    One matrix product each way and far fewer small operations than autograd would record, with both matrices in one
    tensor. Wide rows are kept by reference: changing them in place before the backward pass raises autograd's error.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, form: Form) -> Tensor:
        ctx.wanted = [side for side in (0, 1) if ctx.needs_input_grad[side]]
        value, weights, rows = _evaluate_statistic(x, z, form, ctx.wanted)
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=x.dtype, device=x.device)
        ctx.save_for_backward(*weights, *(rows[side] for side in ctx.wanted))
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        saved, many = ctx.saved_tensors, len(ctx.wanted)
        # That of narrow rows is float64; autograd takes it to the type of its input.
        found = {
            side: _matmul(weights * gradient, rows.detach())
            for side, weights, rows in zip(ctx.wanted, saved[:many], saved[many:], strict=True)
        }
        return found.get(0), found.get(1), None


class _Stackable(torch.autograd.Function):
    """The same as `_Product` in the form that the transforms of `torch.func` need, at several times the fixed cost."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, z: Tensor, form: Form) -> tuple[Tensor, ...]:
        value, weights, rows = _evaluate_statistic(x, z, form, (0, 1), short=False)
        return value, *weights, *rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights_x, weights_z, rows_x, rows_z = ctx.saved_tensors
        rows_x, rows_z = rows_x.detach(), rows_z.detach()
        return _matmul(weights_x * gradient, rows_x), _matmul(weights_z * gradient, rows_z), None


def _evaluate_statistic(
    x: Tensor, z: Tensor, form: Form, wanted: Sequence[int], short: bool = True, factor: float = 1.0
) -> tuple[Number, list[Tensor], Sequence[Tensor]]:
    """Return the statistic, for each `wanted` side the matrix that maps its rows to the gradient, and all rows.

    With the scaled matrices A and B the statistic is their inner product. Its derivative in A is B, or, with A at norm
    1, the part of B orthogonal to A; a root multiplies that by its own derivative. `factor` multiplies the gradients
    alone. `short`: whether on the CPU the value is a float, and single numbers are taken out of their tensors.
    """
    plain, short = short, short and x.is_cpu
    n, matrices = len(x), _fast_matrices(x, z, form) if short else None
    if matrices is None:
        # Under a transform of torch.func no tensor may be read as a number.
        matrices = _careful_matrices(*(_squarable(x, z) if plain else (x, z)), form)
    centered, totals, flat = matrices.centered, matrices.totals, matrices.centered.flatten(1)
    products: Any = _matmul(flat, flat.t())
    if short:
        products, totals = (t.tolist() if isinstance(t, Tensor) else t for t in (products, totals))
    product, squares = products[0][1], (products[0][0], products[1][1])
    factors: list[Number] = [1 / n, 1 / n]
    if form.unit:
        factors = [_to_unit(square, total / n, x.dtype) for square, total in zip(squares, totals, strict=True)]
    inner = product * factors[0] * factors[1]
    value, rise = _root(inner, x.dtype) if form.root else (inner, 1.0)
    weights = []
    for own in wanted:
        # Both centrings are orthogonal projections, so they leave the gradients as they are.
        direction = centered[1 - own] * factors[1 - own]
        if form.unit:
            direction -= centered[own] * (inner * factors[own])
        back = _laplacian(direction, matrices.distances[own], -2 * factor * rise * factors[own])
        weights.append(back.to(matrices.rows[own].dtype))
    return value.to(x.dtype) if isinstance(value, Tensor) else value, weights, matrices.rows


def _product(x: Tensor, z: Tensor, form: Form) -> Tensor:
    if not torch.is_grad_enabled():
        # Otherwise the gradient would be made along with the value.
        x, z = x.detach(), z.detach()
    arguments = (*_check_pair(x, z, form.least), form)
    if torch.is_autocast_enabled(x.device.type):
        # Products would be taken in half precision, where differences are noise.
        with torch.autocast(x.device.type, enabled=False):
            return _product(x, z, form)
    try:
        value: Tensor = _Product.apply(*arguments)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # Inside a transform of torch.func; any other error comes again.
        value = _Stackable.apply(*arguments)[0]  # type: ignore[no-untyped-call]
    return value


def _check_pair(x: Tensor, z: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Check the pair and return both as (n, d) in float32 or float64."""
    for name, value in (("x", x), ("z", z)):
        check_kind(name, value, Tensor, "a tensor")
        if 0 in (value.dim(), value.numel()) or value.is_complex():
            raise InvalidInput(f"{name} is {value.dtype} of shape {tuple(value.shape)}; expected real (n, ...)")
    n = x.shape[0]
    if n != z.shape[0] or n < least:
        raise InvalidInput(f"x has {n} rows and z has {len(z)}; expected equal numbers, at least {least}")
    if x.device != z.device:
        raise InvalidInput(f"x is on {x.device} and z on {z.device}; expected one device")
    # Tensors of two dimensions are returned unchanged: a view would add a node to the backward pass.
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
    grams = torch.stack([_matmul(part, part.t()) for part in rows])
    return _from_grams(grams if grams.device.type in _NO_FLOAT64 else grams.double(), x.dtype) ** 0.5, rows


def _fast_matrices(x: Tensor, z: Tensor, form: Form) -> Matrices | None:
    """Return the matrices of float32 rows on the CPU, without subtracting the mean of wide rows.

    None if that loses digits.

    Operations after a convolution have a high fixed cost, so few are used here.
    """
    n = x.shape[0]
    if x.dtype != torch.float32 or n < 2:
        return None
    rows = [part if part.numel() > _WIDE else part - part.mean(0, dtype=torch.float64) for part in (x, z)]
    grams = torch.empty(2, n, n, dtype=torch.float64, device=x.device)
    for gram, part in zip(grams, rows, strict=True):
        gram.copy_(_matmul(part, part.t()))
    norms = grams.diagonal(0, 1, 2)
    distances = torch.sub(norms.unsqueeze(2), grams, alpha=2).add_(norms.unsqueeze(1)).sqrt_()
    centered, sums = form.center(distances)
    distances.diagonal(0, 1, 2).fill_(math.inf)
    lows, tops, error = distances.amin((1, 2)).tolist(), norms.amax(1).tolist(), 2 * _GRAM_ERROR * _EPS[x.dtype]
    if not (lows[0] ** 2 > error * tops[0] and lows[1] ** 2 > error * tops[1]):
        # Some rows may be equal up to rounding.
        distances, centered, sums = _center_distances(_from_grams(grams, x.dtype).sqrt_(), form)
    # Beyond that, squares leave the range of float32.
    if not all(_LEAST**2 < top < _MOST**2 for top in tops):
        return None
    # The accuracy of a row depends on its length relative to its distances to other rows: for most batches the longest
    # row and the least distance decide, for others each row. Comparisons of numbers that are not finite are false.
    least, totals = sums.amin((1, 2)).tolist(), sums.sum((1, 2)).tolist()
    near = tops[0] <= _FAR * (least[0] / n) ** 2 and tops[1] <= _FAR * (least[1] / n) ** 2
    if near or bool((norms <= _FAR * (sums[..., 0] / n) ** 2).all()):
        return Matrices(distances, centered, totals, rows)
    return None


def _careful_matrices(x: Tensor, z: Tensor, form: Form) -> Matrices:
    """Return the matrices of any two tensors on any device."""
    raw_distances, rows = _distances(x, z)
    distances, centered, sums = _center_distances(raw_distances, form)
    return Matrices(distances, centered, sums.sum((1, 2)), rows)


def _squarable(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return both unchanged, or in float64 if the squares of their numbers overflow or underflow float32."""
    if x.dtype == torch.float64 or x.device.type in _NO_FLOAT64:
        return x, z
    tops = torch.stack([part.detach().abs().amax() for part in (x, z)]).tolist()
    return (x, z) if all(_LEAST < top < _MOST for top in tops) else (x.double(), z.double())


def _center_distances(distances: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distances with infinity for 0, their centred form, and the sums of their rows."""
    centered, sums = form.center(distances)
    return distances.masked_fill(distances == 0, math.inf), centered, sums


def _from_grams(products: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the squared distances of rows from their inner products, (2, n, n)."""
    norms = products.diagonal(0, 1, 2)
    norms = norms[:, :, None] + norms[:, None, :]
    squared = norms - 2 * products
    squared *= squared > norms * (_GRAM_ERROR * _EPS[dtype])
    return squared


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices without a graph, in their own precision."""
    product = torch.mm(a, b)
    if product.dtype == a.dtype:
        return product
    # Autocast has taken it in half precision. To ask first takes 20 us behind a convolution.
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b)


def _laplacian(direction: Tensor, distances: Tensor, factor: Number) -> Tensor:
    """Return, in place, the matrix whose product with the rows is their gradient, from the gradient of the distances.

    `factor`: multiplies the gradient.
    """
    weights = direction.div_(distances).mul_(factor)
    weights.diagonal().sub_(weights.sum(1))
    return weights


def _doubly_centered(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centred matrices and the sums of their rows before, (2, n, 1)."""
    n = distances.shape[-1]
    sums = distances.sum(2, keepdim=True)
    centered = torch.sub(distances, sums, alpha=1 / n)
    return centered.sub_(centered.sum(1, keepdim=True), alpha=1 / n), sums


def _u_centered(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centred matrices and the sums of their rows before, (2, n, 1)."""
    n = distances.shape[-1]
    sums = distances.sum(2, keepdim=True)
    rest = torch.sub(sums, sums.sum(1, keepdim=True), alpha=1 / (n - 1))
    centered = torch.sub(distances, sums, alpha=1 / (n - 2)).sub_(rest.transpose(1, 2), alpha=1 / (n - 2))
    centered.diagonal(0, 1, 2).zero_()
    return centered, sums


def _to_unit(squared_norm: Number, size: Number, dtype: torch.dtype) -> Number:
    """Return the factor that scales a centred matrix to norm 1.

    0 if its norm is 0 up to rounding of distances of `size`.
    """
    norm = squared_norm**0.5
    return 1 / _where(norm <= size * (_CENTERING_ERROR * _EPS[dtype]), math.inf, norm)


def _root(squared: Number, dtype: torch.dtype) -> tuple[Number, Number]:
    """Return the root and its derivative, both 0 if `squared` is zero up to rounding."""
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
