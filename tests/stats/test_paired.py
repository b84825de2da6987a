"""Paired comparisons: against scipy, by hand, and over many simulated studies in which the truth is known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.stats.paired import (
    compare_pairs,
    effect_size,
    holm,
    least_pairs,
    needed_pairs,
    paired_t_power,
    paired_t_test,
    sign_flip_power,
    sign_flip_test,
    signed_rank_test,
)


def draw(n: int, shift: float = 0.3, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=random, dtype=torch.float64) + shift


def flipped(d: Tensor) -> float:
    """The share of all patterns of signs that reach the sum, one by one."""
    sums = [abs(math.fsum(s * v for s, v in zip(signs, d.tolist(), strict=True))) for signs in patterns(len(d))]
    return sum(total >= abs(math.fsum(d.tolist())) - 1e-9 for total in sums) / len(sums)


def patterns(n: int) -> list[tuple[int, ...]]:
    return list(itertools.product((1, -1), repeat=n))


@pytest.mark.parametrize("n", [2, 3, 5, 9, 40, 80])
def test_tests_are_those_of_scipy(n: int) -> None:
    d = draw(n)
    assert paired_t_test(d) == pytest.approx(stats.ttest_1samp(d.numpy(), 0).pvalue, rel=1e-9)
    method = "exact" if n <= 50 else "approx"
    expected = stats.wilcoxon(d.numpy(), method=method, correction=False).pvalue
    assert signed_rank_test(d) == pytest.approx(expected, rel=1e-9)
    interval = stats.ttest_1samp(d.numpy(), 0).confidence_interval(0.9)
    found = compare_pairs(d, 0.9)
    assert (found.low, found.high) == pytest.approx(tuple(interval), rel=1e-9)
    assert found.effect == pytest.approx(float(d.mean() / d.std()), rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 6, 9])
def test_the_sign_flip_test_tries_every_pattern(n: int) -> None:
    d = draw(n, seed=n)
    found = sign_flip_test(d)
    assert found.exact
    assert found.p == pytest.approx(flipped(d), abs=1e-12)


def test_ties_and_zeros_are_counted_exactly() -> None:
    d = torch.tensor([1.0, 1.0, -1.0, 2.0, 2.0, 0.0, -3.0, 4.0], dtype=torch.float64)
    assert sign_flip_test(d).p == pytest.approx(flipped(d), abs=1e-12)
    # Ranks of the sizes 1 1 1 2 2 3 4 are 2 2 2 4.5 4.5 6 7; those of positive ones sum to 20 of 28.
    ranks = torch.tensor([2.0, 2.0, -2.0, 4.5, 4.5, -6.0, 7.0], dtype=torch.float64)
    assert signed_rank_test(d) == pytest.approx(flipped(ranks), abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_tied_ranks_are_their_mean(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    d = torch.randint(-3, 6, (9,), generator=random).double()
    kept = d[d != 0]
    ranks = torch.from_numpy(stats.rankdata(kept.abs().numpy())) * kept.sign()
    assert signed_rank_test(d) == pytest.approx(flipped(ranks), abs=1e-12)


def test_accuracies_that_differ_equally_tie_in_spite_of_rounding() -> None:
    """.9 - .8 and .8 - .7 are not the same float: a sign test of three equal differences has p = 1/4, not more."""
    d = torch.tensor([0.9 - 0.8, 0.8 - 0.7, 0.7 - 0.6], dtype=torch.float64)
    assert sign_flip_test(d).p == 0.25
    assert effect_size(d) == math.inf
    assert math.isnan(paired_t_test(d)), "three equal differences tell nothing of a spread"
    # The sum is larger than that with the first two signs turned over, which is its equal, by rounding alone.
    mixed = torch.tensor([0.8 - 0.9, 0.8 - 0.7, 0.3 - 0.1], dtype=torch.float64)
    assert sign_flip_test(mixed).p == 6 / 8, "sums of .1, .1 and .2 with signs: .4 .2 .2 0 and opposites; six reach .2"


def test_right_and_wrong_answers_are_compared_by_mcnemar() -> None:
    """70 rows that only the second has right, 45 that only the first has, and 900 on which both agree."""
    d = torch.cat([torch.ones(70), -torch.ones(45), torch.zeros(900)])
    found = sign_flip_test(d)
    assert found.exact
    assert found.p == pytest.approx(stats.binomtest(70, 115).pvalue, rel=1e-9)


def test_drawn_patterns_come_close_to_the_normal_limit() -> None:
    d = draw(400, 0.11)
    z = float(d.sum() / d.square().sum().sqrt())
    found, limit = sign_flip_test(d), 2 * stats.norm.sf(abs(z))
    assert not found.exact
    assert found.least == 1e-4
    assert 0.005 < limit < 0.2, "else there is nothing to see"
    # 9999 drawings: four standard errors, and what the limit itself leaves at 400 pairs.
    assert found.p == pytest.approx(limit, abs=4 * math.sqrt(limit / 9999) + 0.003)
    assert sign_flip_test(d) == found, "the same patterns at every call"


def test_few_pairs_say_how_little_they_can_say() -> None:
    assert sign_flip_test(torch.tensor([1.0, 2.0, 5.0])) == (found := sign_flip_test(torch.tensor([3.0, 2.0, 9.0])))
    assert (found.p, found.least) == (0.25, 0.25)
    assert [least_pairs(level) for level in (0.5, 0.25, 0.05, 0.05 / 15)] == [2, 3, 6, 10]
    one = compare_pairs(torch.tensor([4.0]))
    assert (one.n, one.mean, one.flip.p) == (1, 4.0, 1.0)
    assert all(math.isnan(value) for value in (one.low, one.effect, one.t_p))
    none = compare_pairs(torch.zeros(4))
    assert (none.effect, none.t_p, none.flip.p, none.rank_p) == (0.0, 1.0, 1.0, 1.0)


def test_holm_by_hand() -> None:
    # .01 x 4; .02 x 3 = .06; .03 x 2 = .06; .5 x 1: never below the one before, and no test is not counted.
    assert holm([0.5, 0.01, None, 0.03, 0.02]) == pytest.approx([0.5, 0.04, None, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    with pytest.raises(InvalidInput, match=r"p value=1.5 is not allowed; expected a number in \[0, 1\]"):
        holm([1.5])


@pytest.mark.parametrize("effect", [0.1, 0.5, 1.0, 1.39, 3.0, 20.0])
@pytest.mark.parametrize("level", [0.05, 0.05 / 15])
def test_power_of_the_t_test_is_that_of_the_noncentral_t(effect: float, level: float) -> None:
    for n in (13, 24, 100):
        critical, shift = stats.t.isf(level / 2, n - 1), effect * math.sqrt(n)
        expected = stats.nct.sf(critical, n - 1, shift) if shift < 30 else 1.0
        if shift < 3:
            expected += stats.nct.cdf(-critical, n - 1, shift)
        assert paired_t_power(effect, n, level) == pytest.approx(expected, abs=1e-6)


def test_power_at_the_fewest_pairs_is_that_all_have_one_sign() -> None:
    for effect in (0.5, 1.0, 1.5):
        expected = stats.norm.cdf(effect) ** 6 + stats.norm.cdf(-effect) ** 6
        error = math.sqrt(expected * (1 - expected) / 1000)
        assert sign_flip_power(effect, 6, 0.05) == pytest.approx(expected, abs=4 * error)
    assert sign_flip_power(3.0, 5, 0.05) == 0.0, "five pairs cannot reach 5 %"
    assert sign_flip_power(math.inf, 6, 0.05) == 1.0
    with pytest.raises(InvalidInput, match="n=13 is not allowed; expected at most 12"):
        sign_flip_power(1.0, 13, 0.05)


def test_needed_pairs_fall_with_the_effect_and_rise_with_the_tests() -> None:
    effects = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.24, 1.3, 1.39, 1.5, 2.0, 3.0, 30.0, math.inf)
    single, corrected = ([needed_pairs(effect, 0.05 / tests) for effect in effects] for tests in (1, 15))
    for needed in (single, corrected):
        numbers = [n for n in needed if n is not None]
        assert len(numbers) == len(effects)
        assert numbers == sorted(numbers, reverse=True)
    assert all(a is not None and b is not None and a < b for a, b in zip(single, corrected, strict=True))
    # Cohen's table: d_z = .5 takes 34 pairs at 5 % and 80 %.
    assert single[effects.index(0.5)] == 34
    assert (single[-1], corrected[-1]) == (6, 10)
    assert [needed_pairs(effect) for effect in (0.0, 1e-3, math.nan)] == [None, None, None]


def test_needed_pairs_are_enough_and_fewer_are_not() -> None:
    """With d_z = 1.2: 800 simulated studies of that many pairs, and 800 of two fewer."""
    needed = needed_pairs(1.2)
    assert needed is not None
    found = [
        sum(sign_flip_test(draw(n, 1.2, seed)).p <= 0.05 for seed in range(800)) / 800 for n in (needed, needed - 2)
    ]
    assert found[0] > 0.8 - 3 * math.sqrt(0.16 / 800)
    assert found[1] < 0.8


@pytest.mark.exhaustive
def test_intervals_cover_and_nothing_is_claimed_where_nothing_is() -> None:
    """2000 studies of eight seeds whose sides are equal but for a shift that is the same in both."""
    found = [compare_pairs(draw(8, 0.0, seed)) for seed in range(2000)]
    four_errors = 4 * math.sqrt(0.05 * 0.95 / 2000)
    covered = sum(one.low <= 0 <= one.high for one in found) / 2000
    assert abs(covered - 0.95) < four_errors
    for p_values in ([one.flip.p for one in found], [one.t_p for one in found], [one.rank_p for one in found]):
        assert sum(p <= 0.05 for p in p_values) / 2000 < 0.05 + four_errors


def test_the_sign_flip_test_holds_for_differences_of_single_rows() -> None:
    """Six seeds of an accuracy on few rows: a difference is one row more or less, and often the same in all."""
    random = torch.Generator().manual_seed(3)
    d = torch.randint(2, (2000, 6), generator=random).double() * 2 - 1
    wrong = sum(sign_flip_test(row).p <= 0.05 for row in d) / 2000
    assert wrong < 2 / 64 + 4 * math.sqrt(2 / 64 / 2000)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(0), r"differences have shape \(0,\); expected \(n,\) with n >= 1"),
        (torch.zeros(2, 2), r"differences have shape \(2, 2\)"),
        (torch.tensor([1.0, math.nan]), "differences hold nan; expected finite numbers"),
    ],
)
def test_what_is_no_list_of_differences_is_refused(bad: Tensor, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        compare_pairs(bad)
