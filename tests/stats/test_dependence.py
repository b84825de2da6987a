"""Distance correlation against the dcor package, hand-worked values, its gradients and its null distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.stats import dependence
from splitfed.stats.dependence import (
    distance_correlation,
    distance_correlation_sqr,
    distance_covariance_sqr,
    permutation_test,
    slope,
    u_distance_correlation_sqr,
)
from tests.stats import dcor_oracle
from tests.thinning import thin

CORRELATIONS = [distance_correlation_sqr, distance_correlation, u_distance_correlation_sqr]
STATISTICS = [distance_covariance_sqr, *CORRELATIONS]


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def _pair(n: int, wide_x: int, wide_z: int, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    x, noise = _normal(n, wide_x, seed=seed), _normal(n, wide_z, seed=seed + 1)
    return dcor_oracle.as_kind(x, noise + x[:, :1] ** 2, kind)


@pytest.mark.parametrize("kind", dcor_oracle.KINDS)
@pytest.mark.parametrize(("n", "wide_x", "wide_z"), dcor_oracle.SIZES)
def test_agrees_with_dcor_to_1e_10(n: int, wide_x: int, wide_z: int, kind: str) -> None:
    x, z = dcor_oracle.pair(n, wide_x, wide_z, kind)
    expected = dcor_oracle.stored()[f"{n} x {wide_x} x {wide_z} {kind}"]
    for statistic in STATISTICS:
        value = expected[statistic.__name__]
        assert abs(float(statistic(x, z)) - value) < 1e-10 * max(1.0, value)


def test_three_rows_by_hand() -> None:
    # Distances of 0, 0, 1 have row means 1/3, 1/3, 2/3 and mean 4/9; centred, in units of 2/9:
    #   -1 -1  2 / -1 -1  2 / 2  2 -4: sum of squares 36 (2/9)², over 9 pairs 16/81.
    # Those of 0, 1, 1 are the same turned round: -4 2 2 / 2 -1 -1 / 2 -1 -1. Their product sums to
    #   4 + 1 + 4 on the diagonal and 2 (-2 + 4 - 2) beside it: 9 (2/9)², over 9 pairs 4/81.
    x = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    z = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    assert float(distance_covariance_sqr(x, x)) == pytest.approx(16 / 81)
    assert float(distance_covariance_sqr(x, z)) == pytest.approx(4 / 81)
    assert float(distance_correlation_sqr(x, z)) == pytest.approx(1 / 4)
    assert float(distance_correlation(x, z)) == pytest.approx(1 / 2)


def test_four_rows_by_hand_bias_corrected() -> None:
    # 0, 0, 1, 1: every row sums to 2, all to 8; centred a - 4/2 + 8/6 = a - 2/3: pairs 12, 34 hold -2/3, the other
    # four 1/3. 0, 1, 0, 1 holds -2/3 at 13, 24. Over pairs: squares 12/9; product 4 (-2/9) + 2 (1/9) = -6/9.
    x = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    z = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    assert float(u_distance_correlation_sqr(x, z)) == pytest.approx(-1 / 2)
    assert float(u_distance_correlation_sqr(x, 5 - 3 * x)) == pytest.approx(1)


def test_parabola_depends_though_uncorrelated() -> None:
    # x at the 2000 midpoint quantiles of the normal law: Pearson's correlation of x and x² is 0 by symmetry.
    x = math.sqrt(2) * torch.erfinv(torch.linspace(-1, 1, 4001, dtype=torch.float64)[1::2])
    assert float(distance_correlation(x, x**2)) == pytest.approx(0.538, abs=0.01)


@pytest.mark.parametrize(("n", "bias"), [(32, 0.993), (128, 0.974), (512, 0.909)])
def test_biased_form_is_near_one_on_independent_images_and_corrected_form_near_zero(n: int, bias: float) -> None:
    x, z = _normal(n, 1, 28, 28, seed=1), _normal(n, 5, 10, 10, seed=2)
    assert float(distance_correlation(x, z)) == pytest.approx(bias, abs=0.004)
    assert abs(float(u_distance_correlation_sqr(x, z))) < 4 / n


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("kind", ["plain", "duplicates", "constant column"])
def test_gradients_match_finite_differences(statistic, kind: str) -> None:
    x, z = _pair(6, 2, 3, kind, seed=5)
    # A duplicate row sits on the kink of its distance: central differences give 0 there, as the slope does.
    assert torch.autograd.gradcheck(statistic, (x.requires_grad_(), z.requires_grad_()))
    assert torch.autograd.gradcheck(lambda z: statistic(x.detach(), z.reshape(6, -1)), (z,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("value", [0.0, 0.1, 12345.678])
def test_constant_release_gives_value_and_gradient_zero(statistic, dtype: torch.dtype, value: float) -> None:
    x = _normal(7, 5, dtype=dtype).requires_grad_()
    z = torch.full((7, 300), value, dtype=dtype, requires_grad=True)
    result = statistic(x, z)
    assert result.item() == 0
    for gradient in torch.autograd.grad(result, (x, z)):
        assert gradient.abs().max().item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_active_row_is_degenerate_for_the_corrected_form(dtype: torch.dtype) -> None:
    # One row apart from n - 1 equal ones: every entry of the U-centred matrix is 0, which rounding hides.
    z = torch.zeros(9, 3, dtype=dtype)
    z[4] = 0.3
    z.requires_grad_()
    result = u_distance_correlation_sqr(_normal(9, 4, dtype=dtype), z)
    assert result.item() == 0
    assert torch.autograd.grad(result, z)[0].abs().max().item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_root_is_flat_at_exact_independence(dtype: torch.dtype) -> None:
    # A full factorial design: the biased covariance is 0, where the root has no finite slope.
    x = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=dtype)
    z = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=dtype, requires_grad=True)
    result = distance_correlation(x, z)
    assert result.item() == 0
    assert torch.autograd.grad(result, z)[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("offset", [0.0, 2.0, 2.7, 1e3])
@pytest.mark.parametrize(("n", "wide_x", "wide_z"), [(16, 5, 3), (64, 784, 3136), (65, 3, 50)])
def test_float32_agrees_with_float64(n: int, wide_x: int, wide_z: int, offset: float, equal: bool) -> None:
    # With the mean of wide rows left in (a little off the origin) and taken out; without equal rows and with some.
    x = _normal(n, wide_x, dtype=torch.float32) + offset
    z = _normal(n, wide_z, seed=1, dtype=torch.float32) + x[:, :1] - 2 * offset
    if equal:
        x[1], z[3:5] = x[0], z[2]
    for statistic in CORRELATIONS:
        single, double = z.clone().requires_grad_(), z.double().requires_grad_()
        value, exact = statistic(x, single), statistic(x.double(), double)
        assert value.dtype == torch.float32
        assert abs(value.item() - exact.item()) < 2e-6
        gradient = torch.autograd.grad(value, single)[0].double()
        true_gradient = torch.autograd.grad(exact, double)[0]
        assert (gradient - true_gradient).norm() < 1e-3 * true_gradient.norm()


def test_a_tight_cluster_far_from_the_origin_keeps_its_digits_beside_an_outlier() -> None:
    # On the whole the batch is not far from the origin; all of its rows but one are.
    x = 3e-4 * _normal(256, 200) / 200**0.5
    z = x.clone()
    z[:, 0] += 0.4
    z[0] = 1.28 * _normal(200, seed=1) / 200**0.5
    single = z.float().requires_grad_()
    value = u_distance_correlation_sqr(x.float(), single)
    exact = z.requires_grad_()
    expected = u_distance_correlation_sqr(x, exact)
    assert expected.item() > 0.9
    assert value.item() == pytest.approx(expected.item(), abs=1e-3)
    (found,), (true,) = torch.autograd.grad(value, single), torch.autograd.grad(expected, exact)
    assert (found - true).norm() < 0.05 * true.norm()


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """The product with every sum taken from left to right: of all orders of summation the one that loses most."""
    product = torch.zeros(len(a), b.shape[1], dtype=a.dtype)
    for column, row in zip(a.t(), b, strict=True):
        product += column[:, None] * row
    return product


@pytest.mark.parametrize("order", ["of this processor", "backwards", "one by one"])
@pytest.mark.parametrize(("wide", "times"), thin([(1000, 3e3), (16384, 1e3)], 2))
@pytest.mark.parametrize("statistic", CORRELATIONS, ids=lambda s: s.__name__)
def test_one_row_far_from_all_others_costs_them_no_digits(
    statistic, wide: int, times: float, order: str, monkeypatch
) -> None:
    # Taking out the mean in float32, which that row moves, would cost the others theirs; so would its distances in
    # float32, which differ from each other in their sixth digit.
    n = 16
    x, z = _normal(n, 3), _normal(n, wide, seed=1)
    z[0] *= times
    if order == "one by one":
        monkeypatch.setattr(dependence, "_matmul", _one_by_one)
    x, z = (t.flip(1) if order == "backwards" else t for t in (x, z))
    single, exact = z.float().requires_grad_(), z.requires_grad_()
    value, expected = statistic(x.float(), single), statistic(x, exact)
    # Centred distances are about 1. A sum of `wide` products of two rows is right to sqrt(wide) 2^-24 of their lengths:
    # it moves a distance to the far row by that part of the other's length, sqrt(wide), and all others by less. The far
    # row's own length moves all of its distances alike: U-centring takes that out, and it scales the biased forms,
    # where nothing else counts, as a whole. The n² errors are independent, so the value moves by an nth of one.
    error = wide * 2**-24
    assert abs(value.item() - expected.item()) < error / n
    (found,), (true,) = torch.autograd.grad(value, single), torch.autograd.grad(expected, exact)
    assert (found - true).norm() < error * true.norm()


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_rows_equal_up_to_rounding_are_at_distance_zero_in_float32(offset: float) -> None:
    # Ten pairs of rows an ulp or so apart: the Gram matrix gives squared distances of either sign there. Without
    # noise only the pattern of pairs is left, so z, which shares it, depends on x perfectly.
    x = torch.arange(10.0).repeat_interleave(2).sin().reshape(20, 1) * torch.linspace(1, 2, 4000) + offset
    x = x * (1 + 1e-7 * _normal(20, 4000, dtype=torch.float32))
    z = (3 * x.flip(1)).requires_grad_()
    result = distance_correlation(x, z)
    assert result.item() == pytest.approx(1, abs=1e-5)
    assert torch.autograd.grad(result, z)[0].abs().max() < 1e-5


def test_half_precision_autocast_and_whole_numbers() -> None:
    x, z = _normal(32, 20, dtype=torch.float32), _normal(32, 30, seed=1, dtype=torch.float32)
    plain = distance_correlation(x, z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert distance_correlation(x, z).item() == plain.item()
    release = z.bfloat16().requires_grad_()
    half = distance_correlation(x, release)
    assert half.dtype == torch.float32
    assert half.item() == distance_correlation(x, z.bfloat16().float()).item()
    assert torch.autograd.grad(half, release)[0].dtype == torch.bfloat16
    labels = torch.arange(32) % 3
    assert distance_correlation(x, labels).item() == pytest.approx(distance_correlation(x, labels.double()).item())


def test_lanes_stack_with_vmap() -> None:
    x, z = _normal(3, 8, 4, dtype=torch.float32), _normal(3, 8, 5, seed=1, dtype=torch.float32)
    stacked = torch.func.vmap(torch.func.grad(distance_correlation, argnums=1))(x, z)
    alone = torch.stack([torch.func.grad(distance_correlation, argnums=1)(a, b) for a, b in zip(x, z, strict=True)])
    torch.testing.assert_close(stacked, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("kind", ["plain", "duplicates", "constant"])
def test_transforms_give_what_autograd_gives(statistic, kind: str, dtype: torch.dtype) -> None:
    # In float32 two ways to the same numbers.
    x, z = (t.to(dtype) for t in _pair(8, 4, 5, "duplicates" if kind == "duplicates" else "", 3))
    if kind == "constant":
        z = torch.ones_like(z)
    near = {"rtol": 1e-11, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    value, slopes = torch.func.vjp(statistic, x, z)
    x.requires_grad_(), z.requires_grad_()
    plain = statistic(x, z)
    torch.testing.assert_close(plain, value, **near)
    seed = torch.tensor(3.0, dtype=x.dtype)
    torch.testing.assert_close(torch.autograd.grad(plain, [x, z], seed), slopes(seed), **near)


@pytest.mark.parametrize("statistic", CORRELATIONS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_slope_is_autograds(statistic, dtype: torch.dtype) -> None:
    x, z = _normal(12, 3, 4), _normal(12, 2, 5, seed=1).to(dtype).requires_grad_()
    x = x if dtype == torch.float64 else x.float()
    found = slope(x, z, statistic.__name__, 0.3)
    assert (found.shape, found.dtype, found.requires_grad) == (z.shape, dtype, False)
    (expected,) = torch.autograd.grad(0.3 * statistic(x, z), z)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(slope(x, z, statistic.__name__, 0.3), found, rtol=0, atol=0)


def test_a_slope_is_refused_what_the_statistic_is() -> None:
    with pytest.raises(InvalidInput, match="x has 3 rows and z has 3; expected equal numbers, at least 4"):
        slope(_normal(3, 2), _normal(3, 2), "u_distance_correlation_sqr")


def test_copies_of_every_row_keep_the_statistic_and_share_its_slope() -> None:
    x, z = _normal(160, 300, dtype=torch.float32), _normal(160, 250, seed=1, dtype=torch.float32)
    release = z.clone().requires_grad_()
    few = distance_correlation(x, release)
    many = z.repeat(4, 1).requires_grad_()
    alike = distance_correlation(x.repeat(4, 1), many)
    torch.testing.assert_close(alike, few, rtol=1e-6, atol=0)
    narrow, wide = torch.autograd.grad(few, release)[0], torch.autograd.grad(alike, many)[0]
    assert (wide.view(4, 160, 250).sum(0) - narrow).norm() < 1e-3 * narrow.norm()


def test_tiny_numbers_and_another_default_device() -> None:
    x, z = _normal(8, 3), _normal(8, 2, seed=1)
    assert float(distance_correlation(1e-157 * x, 1e-157 * z)) == pytest.approx(float(distance_correlation(x, z)))
    release = z.float().requires_grad_()
    with torch.device("meta"):
        value = distance_correlation(x.float(), release)
        found = slope(x.float(), release, "distance_correlation")
    assert value.device.type == found.device.type == "cpu"
    value.backward()


@pytest.mark.parametrize(("wide", "value"), [(2, math.nan), (2, math.inf), (5000, math.nan), (5000, math.inf)])
def test_what_is_not_finite_in_float32_passes_without_a_warning(wide: int, value: float) -> None:
    x, z = _normal(8, 3, dtype=torch.float32), _normal(8, wide, seed=1, dtype=torch.float32)
    z[2, 1] = value
    release = z.requires_grad_()
    result = distance_correlation(x, release)
    assert result.isnan()
    assert torch.autograd.grad(result, release)[0].isnan().any()
    assert slope(x, release, "distance_correlation").isnan().any()


@pytest.mark.parametrize("wide", [5, 5000])
@pytest.mark.parametrize("factor", [1e-30, 1e18, 1e22, 1e25])
def test_the_scale_of_rows_costs_no_digits(factor: float, wide: int) -> None:
    # Their squares have no place in float32.
    x, z = _normal(8, 3, dtype=torch.float32), _normal(8, wide, seed=1, dtype=torch.float32)
    x[:, 0] = z[:, 0]
    scaled, plain = (factor * z).requires_grad_(), z.requires_grad_()
    for statistic in CORRELATIONS:
        value, expected = statistic(x, scaled), statistic(x, plain)
        # The scaled rows are rounded: 2^-24 of each number, of its row's distances, and of the statistic.
        assert value.item() == pytest.approx(expected.item(), abs=4 * 2**-24)
        (found,), (true,) = torch.autograd.grad(value, scaled), torch.autograd.grad(expected, plain)
        assert (factor * found - true).norm() < 1e-5 * true.norm()


def test_nan_is_not_hidden_and_one_row_is_constant() -> None:
    x, z = _normal(6, 3, dtype=torch.float32), _normal(6, 3, seed=1, dtype=torch.float32)
    z[2, 1] = math.nan
    assert all(math.isnan(statistic(x, z).item()) for statistic in STATISTICS)
    assert distance_correlation(x[:1], x[:1]).item() == 0
    assert distance_correlation(x[:2], x[:2] ** 3).item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["u_distance_correlation_sqr", "distance_correlation_sqr", "distance_correlation"])
def test_permutation_null_is_the_statistic_of_the_shuffled_pairs(name) -> None:
    x, z = _pair(12, 2, 3, "plain", seed=3)
    statistic = {f.__name__: f for f in CORRELATIONS}[name]
    result = permutation_test(x, z, 5, generator(9), statistic=name)
    draws = generator(9)
    expected = [statistic(x, z[torch.randperm(12, generator=draws)]).item() for _ in range(5)]
    assert result.statistic == pytest.approx(statistic(x, z).item(), abs=1e-12)
    assert result.null.tolist() == pytest.approx(expected, abs=1e-12)


def test_permutation_p_values() -> None:
    x = _normal(40, 2)
    dependent = permutation_test(x, x**2, 199, generator(1))
    assert dependent.p_value == 1 / 200  # no shuffle reaches the true pairing
    assert dependent.null.shape == (199,)
    assert abs(dependent.null.mean().item()) < 0.02
    assert permutation_test(x, torch.ones(40, 2), 19, generator(1)).p_value == 1.0  # 0 is reached every time
    # Two rows: a shuffle keeps or swaps them, the distance is the same, so every one ties.
    assert permutation_test(x[:2], x[2:4], 19, generator(1), "distance_correlation").p_value == 1.0


def test_permutation_p_values_are_uniform_on_independent_data() -> None:
    pairs = [(_normal(16, 3, seed=seed), _normal(16, 2, seed=1000 + seed)) for seed in range(200)]
    values = [permutation_test(x, z, 19, generator(seed)).p_value for seed, (x, z) in enumerate(pairs)]
    # Exact: P(p <= k/20) = k/20. Bands are four standard deviations of a count of 200.
    for k in (1, 5, 10, 15):
        share = sum(p <= k / 20 for p in values) / 200
        assert abs(share - k / 20) < 4 * math.sqrt(k / 20 * (1 - k / 20) / 200)


@pytest.mark.parametrize(
    ("x", "z", "message"),
    [
        (torch.ones(3, 2), torch.ones(4, 2), "x has 3 rows and z has 4"),
        (torch.tensor(1.0), torch.ones(4, 2), r"x is torch.float32 of shape \(\)"),
        (torch.ones(4, 2), torch.ones(4, 0), r"z is torch.float32 of shape \(4, 0\)"),
        (torch.ones(4, 2), torch.ones(4, 2, device="meta"), "x is on cpu and z on meta"),
        (torch.ones(3, 2), torch.ones(3, 2), "at least 4"),
    ],
)
def test_bad_pairs_are_refused(x: Tensor, z: Tensor, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        u_distance_correlation_sqr(x, z)


def test_bad_permutation_tests_are_refused() -> None:
    x = torch.ones(5, 2)
    with pytest.raises(InvalidInput, match="permutations=0"):
        permutation_test(x, x, 0, generator(0))
    with pytest.raises(InvalidInput, match="did you mean 'distance_correlation'"):
        permutation_test(x, x, 9, generator(0), statistic="distance_correlatio")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="z holds a value that is not finite"):
        permutation_test(x, x * math.inf, 9, generator(0))
