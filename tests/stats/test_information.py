"""Mutual information of noisy releases between its bounds, and HSIC: by hand, at the ends of their ranges."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.stats import hsic
from splitfed.stats.hsic import permutation_test_hsic
from splitfed.stats.mutual_information import mutual_information


def drawn(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=generator(seed, "information")).double()


def hsic_unbiased(x: Tensor, z: Tensor) -> float:
    """Return the unbiased HSIC of which the alignment is made."""
    return float(hsic._unbiased(*(hsic._off_diagonal(kernel) for kernel in hsic._kernels(x, z))))


def alignment(x: Tensor, z: Tensor) -> float:
    """Return the statistic of the permutation test."""
    return permutation_test_hsic(x, z, 1, generator(0)).statistic


def test_information_of_a_linear_gaussian_channel_lies_between_the_estimates() -> None:
    """x ~ N(0, I), z = x A + N(0, 1): log det(I + A'A) / 2."""
    mixing = torch.tensor([[1.0, 0.5], [0.0, 0.8]]).double()
    true = float(torch.logdet(torch.eye(2) + mixing.T @ mixing)) / 2
    found = mutual_information(drawn(600, 2, 0) @ mixing, drawn(1500, 2, 1) @ mixing, "gaussian", generator(0))
    assert found.lower - 3 * found.lower_error < true < found.upper + 3 * found.upper_error
    assert found.upper - found.lower < 0.05
    assert 0.01 < found.lower_error < 0.06
    assert not found.saturated


def test_information_of_signs_under_laplace_noise() -> None:
    """x = +-a with equal chance: information by the integral over z of a Laplace density, by numbers."""
    a, grid = 1.5, torch.linspace(-30, 30, 600_001).double()
    densities = [(-(grid - s * a).abs()).exp() / 2 for s in (-1, 1)]
    middle = (densities[0] + densities[1]) / 2
    true = float((densities[1] * (densities[1] / middle).log()).sum() * (grid[1] - grid[0]))
    signs = (2 * torch.randint(0, 2, (2000, 1), generator=generator(0)) - 1).double() * a
    found = mutual_information(signs[:1000], signs[1000:], "laplace", generator(1))
    assert found.lower == pytest.approx(true, abs=4 * found.lower_error + 0.005)
    assert found.upper == pytest.approx(true, abs=4 * found.upper_error + 0.005)


def test_where_nothing_is_told_there_is_no_information_and_where_all_is_only_a_lower_bound() -> None:
    blind = mutual_information(0 * drawn(50, 3, 0), 0 * drawn(99, 3, 1), "gaussian", generator(0))
    assert (blind.lower, blind.upper) == (pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))
    told = mutual_information(1e3 * drawn(50, 3, 0), 1e3 * drawn(99, 3, 1), "gaussian", generator(0))
    assert told.lower == pytest.approx(math.log(100)) == told.most
    assert told.saturated
    assert told.upper > 1e4


@pytest.mark.parametrize(("rows", "others", "kind", "text"), [
    (1, 5, "gaussian", r"clean has shape \(1, 2\)"),
    (5, 0, "gaussian", r"others \(0, 2\)"),
    (5, 5, "gausian", "unknown kind of noise 'gausian'; did you mean 'gaussian'"),
])  # fmt: skip
def test_what_cannot_be_estimated_is_refused(rows: int, others: int, kind: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        mutual_information(drawn(rows, 2, 0), drawn(others, 2, 1), kind, generator(0))


def test_unbiased_hsic_is_the_mean_over_tuples_without_repetition() -> None:
    """Of six pairs, by the definition: K_ij L_ij + K_ij L_kl - 2 K_ij L_ik over all distinct i, j, k, l."""
    x, z = drawn(6, 2, 0), drawn(6, 3, 1)
    k, level = hsic._kernel(x), hsic._kernel(z)
    tuples = list(itertools.permutations(range(6), 4))
    by_hand = sum(float(k[i, j] * (level[i, j] + level[p, q] - 2 * level[i, p])) for i, j, p, q in tuples) / len(tuples)
    assert hsic_unbiased(x, z) == pytest.approx(by_hand, abs=1e-12)


def test_alignment_at_its_ends() -> None:
    x = drawn(30, 4, 0)
    assert alignment(x, x) == pytest.approx(1)
    assert alignment(x, 1000 * x + 5) == pytest.approx(1), "no unit matters"
    assert alignment(x, torch.ones(30, 2)) == 0
    assert hsic_unbiased(x, torch.ones(30, 2)) == pytest.approx(0, abs=1e-15)


def test_independent_rows_have_none_on_average() -> None:
    found = torch.tensor([hsic_unbiased(drawn(20, 3, s), drawn(20, 3, 1000 + s)) for s in range(100)])
    assert abs(float(found.mean())) < 3 * float(found.std()) / 10


def test_dependence_that_no_line_sees_is_found() -> None:
    x = drawn(60, 1, 0)
    found = permutation_test_hsic(x, x.square(), 99, generator(0))
    assert found.p_value == 0.01
    assert found.statistic > 0.2
    blind = permutation_test_hsic(x, drawn(60, 1, 5), 99, generator(0))
    assert blind.p_value > 0.05
    assert len(blind.null) == 99


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="x has 3 rows and z has 3; expected equal numbers, at least 4"):
        hsic_unbiased(drawn(3, 1, 0), drawn(3, 1, 1))
    with pytest.raises(InvalidInput, match="z holds a value that is not finite"):
        alignment(drawn(4, 1, 0), drawn(4, 1, 1) / 0)
