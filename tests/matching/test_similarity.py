"""Similarities against values worked out by hand, loops over all tuples, and their null distributions."""

from __future__ import annotations

import math
from functools import partial
from itertools import permutations

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.matching.similarity import (
    cosine,
    gaussian_kernel,
    hsic,
    kernel_alignment,
    median_bandwidth,
    mmd_sqr,
)

HALF = math.exp(-0.5)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def _column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def _gram(x: Tensor) -> list[list[float]]:
    width = float(median_bandwidth(x))
    return [[math.exp(-float((a - b).square().sum()) / (2 * width**2)) for b in x] for a in x]


def test_cosine_by_hand() -> None:
    found = cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[4.0, 3.0], [-6.0, -8.0]]))
    assert torch.allclose(found, torch.tensor([[24 / 25, -1.0], [0.0, 0.0]]))


def test_median_bandwidth_by_hand() -> None:
    assert float(median_bandwidth(_column(0, 1, 3))) == 2  # distances 1, 2, 3
    assert float(median_bandwidth(_column(0, 1))) == 1
    assert float(median_bandwidth(_column(5, 5, 5, 9))) == pytest.approx(4)  # 0, 0, 0, 4, 4, 4: the lower middle is 0
    assert float(median_bandwidth(_column(7, 7))) == 1


def test_gaussian_kernel_by_hand() -> None:
    found = gaussian_kernel(_column(0, 2), _column(0, 2, 4), 2.0)
    expected = torch.tensor([[1, HALF, HALF**4], [HALF, 1, HALF]], dtype=torch.float64)
    assert torch.allclose(found, expected, atol=1e-14)


def test_kernels_keep_their_digits_far_from_the_origin() -> None:
    near, far = (
        gaussian_kernel(_column(0, 2), _column(0, 2), 2.0),
        gaussian_kernel(_column(1e6, 1e6 + 2).float(), _column(1e6, 1e6 + 2).float(), 2.0),
    )
    assert torch.allclose(far.double(), near, atol=1e-6)


def test_alignment_of_one_column_is_the_correlation_squared() -> None:
    # Deviations -1, 0, 1 and -3, -1, 4: products sum to 7, squares to 2 and 26.
    assert float(kernel_alignment(_column(0, 1, 2), _column(0, 2, 7))) == pytest.approx(49 / 52)


def test_gaussian_hsic_of_two_pairs_by_hand() -> None:
    # Both kernels are 1 and e^-1/2; centred, ±(1 - e^-1/2)/2: four products over (n - 1)² = 1.
    assert float(hsic(_column(0, 1), _column(3, 8))) == pytest.approx((1 - HALF) ** 2)


@pytest.mark.parametrize("n", [5, 8])
def test_biased_hsic_agrees_with_loops(n: int) -> None:
    x, z = _normal(n, 3), _normal(n, 2, seed=1)
    k, m, r = _gram(x), _gram(z), range(n)
    both = sum(k[i][j] * m[i][j] for i in r for j in r) / n**2
    apart = sum(k[i][j] * m[p][q] for i in r for j in r for p in r for q in r) / n**4
    mixed = sum(k[i][j] * m[i][q] for i in r for j in r for q in r) / n**3
    expected = (both + apart - 2 * mixed) * n**2 / (n - 1) ** 2
    assert abs(float(hsic(x, z)) - expected) < 1e-10


def test_hsic_over_all_shuffles() -> None:
    x, z = _normal(5, 3), _normal(5, 3, seed=1)
    shuffles = [list(order) for order in permutations(range(5))]
    # The mean keeps trace times trace of the centred kernels over (n - 1)³.
    center = torch.eye(5, dtype=torch.float64) - 1 / 5
    traces = [float((center @ torch.tensor(_gram(v), dtype=torch.float64) @ center).trace()) for v in (x, z)]
    biased = torch.stack([hsic(x, z[order]) for order in shuffles])
    assert float(biased.mean()) == pytest.approx(traces[0] * traces[1] / 4**3)


def test_alignment_ignores_scale_shift_and_rotation() -> None:
    x, z = _normal(20, 4), _normal(20, 3, seed=1)
    rotation = torch.linalg.qr(_normal(4, 4, seed=2)).Q
    assert float(kernel_alignment(x, 5 - 3 * x)) == pytest.approx(1, abs=1e-12)
    value = float(kernel_alignment(x, z))
    assert 0 < value < 0.9
    assert float(kernel_alignment(1e-3 * x @ rotation + 7, 50 * z)) == pytest.approx(value, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alignment_with_a_constant_is_zero_and_far_away_is_not_constant(dtype: torch.dtype) -> None:
    x = _normal(30, 3)
    constant = torch.full((30, 2), 1e4 / 3)
    assert float(kernel_alignment(x.to(dtype), constant.to(dtype))) == 0
    far = (x + 1e4).to(dtype)
    assert float(kernel_alignment(far, x.to(dtype))) > 0.99


def test_mmd_by_hand() -> None:
    # Equal sets of two: e^-1/2 within each, and (1 + e^-1/2) / 2 between them.
    same = _column(0, 2)
    assert float(mmd_sqr(same, same, 2.0)) == pytest.approx(HALF - 1)
    # One apart: e^-1/2 within each; e^-1/8, e^-9/8 and twice e^-1/8 between them.
    eighth = math.exp(-1 / 8)
    assert float(mmd_sqr(same, same + 1, 2.0)) == pytest.approx(2 * HALF - (3 * eighth + eighth**9) / 2)


def test_mmd_agrees_with_loops() -> None:
    x, y, width = _normal(7, 3), _normal(5, 3, seed=1) + 0.5, 1.3

    def mean(a: Tensor, b: Tensor, within: bool) -> float:
        found = [
            math.exp(-float((a[i] - b[j]).square().sum()) / (2 * width**2))
            for i in range(len(a))
            for j in range(len(b))
            if not (within and i == j)
        ]
        return sum(found) / len(found)

    expected = mean(x, x, True) + mean(y, y, True) - 2 * mean(x, y, False)
    assert abs(float(mmd_sqr(x, y, width)) - expected) < 1e-10


def test_mmd_of_one_distribution_is_zero_on_average_and_grows_with_a_shift() -> None:
    pairs = [(_normal(40, 3, seed=2 * i), _normal(40, 3, seed=2 * i + 1)) for i in range(50)]
    null = torch.stack([mmd_sqr(x, y, 2.0) for x, y in pairs])
    assert abs(float(null.mean())) < 3 * float(null.std()) / math.sqrt(50)
    shifted = [float(torch.stack([mmd_sqr(x, y + shift, 2.0) for x, y in pairs]).mean()) for shift in (0.5, 1.0)]
    assert 5 * float(null.std()) < shifted[0] < shifted[1]


def test_distributions_ignore_the_order_of_rows_and_pairs_do_not() -> None:
    x = _normal(20, 3)
    turned = x.flip(0)
    z = _normal(15, 3, seed=1)
    assert float(mmd_sqr(turned, z, 2.0)) == pytest.approx(float(mmd_sqr(x, z, 2.0)), abs=1e-14)
    assert float(hsic(x, turned)) < 0.5 * float(hsic(x, x))
    assert float(kernel_alignment(x, turned)) < 0.5


def test_a_batch_gives_the_values_of_its_entries() -> None:
    x, z = _normal(4, 6, 3), _normal(4, 6, 3, seed=1)
    for measure in (hsic, kernel_alignment, partial(mmd_sqr, bandwidth=2.0), cosine):
        alone = torch.stack([measure(a, b) for a, b in zip(x, z, strict=True)])
        assert torch.allclose(measure(x, z), alone, atol=1e-14)


def test_gradients_are_those_of_finite_differences() -> None:
    x, z = _normal(5, 2).requires_grad_(), _normal(5, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: mmd_sqr(a, b, 0.8), (x, z))
    assert torch.autograd.gradcheck(kernel_alignment, (x, z))
    # The bandwidth counts as a constant, so a common factor on x has a slope although it leaves the value as it is.
    (slope,) = torch.autograd.grad(hsic(x, z), x)
    assert float((slope * x.detach()).sum().abs()) > 1e-4
    assert bool(torch.isfinite(torch.autograd.grad(hsic(z, z.detach()), z)[0]).all())


ONE, TWO = torch.zeros(1, 2), torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hsic(ONE, ONE), "x has 1 rows; expected at least 2"),
        (lambda: hsic(TWO, torch.zeros(3, 2)), "x has (2,) rows and z has (3,) rows; expected pairs of rows"),
        (lambda: mmd_sqr(ONE, TWO, 1.0), "x has 1 rows; expected at least 2"),
        (lambda: mmd_sqr(TWO, torch.zeros(2, 3), 1.0), "x has rows of 2 values and y of 3; expected equal widths"),
        (lambda: mmd_sqr(TWO, TWO, 0.0), "bandwidth=0.0 is not allowed"),
        (lambda: gaussian_kernel(TWO, TWO, -1.0), "bandwidth=-1.0 is not allowed; expected finite numbers above 0"),
        (lambda: cosine(torch.zeros(2), TWO), "x is torch.float32 of shape (2,); expected floats of shape (..., n, d)"),
        (lambda: cosine(TWO, torch.full((1, 2), math.nan)), "y holds a value that is not finite"),
        (lambda: cosine(TWO, torch.zeros(2, 3)), "x has rows of 2 values and y of 3; expected equal widths"),
    ],
)
def test_bad_input_is_one_line(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput) as error:
        call()
    assert text in str(error.value)
    assert "\n" not in str(error.value)
