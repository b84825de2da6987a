"""Intervals: Student t and Wilson's worked by hand, bootstrap against what it must give, ranges, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.stats.intervals import Interval, bootstrap_interval, mean_interval, metric_interval, share_interval


def test_student_interval_by_hand() -> None:
    # 1, 2, 3: mean 2, standard deviation 1; t at .975 with 2 degrees of freedom is 4.302653: half 4.302653 / √3.
    interval = mean_interval([1, 2, 3])
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.high - 2 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert 2 - interval.low == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    # Two values at level 1/2: t with one degree of freedom is Cauchy's, tan(pi / 4) = 1; deviation √2 over √2.
    assert mean_interval([0.0, 2.0], level=0.5) == Interval(1.0, pytest.approx(0), pytest.approx(2), 2)


def test_equal_values_have_width_zero() -> None:
    assert mean_interval([0.5] * 4) == Interval(0.5, 0.5, 0.5, 4)
    assert bootstrap_interval(torch.full((5,), 0.25), generator(0)) == Interval(0.25, 0.25, 0.25, 5)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([1.0, 1 - 2**-52], -1.0, 1.0),
        ([-1.0, 2**-52 - 1], -1.0, 1.0),
        ([1.0, 1 - 2**-52], 0.0, 1.0),
    ],
)
def test_an_interval_next_to_a_bound_lies_within_it(values: list[float], low: float, high: float) -> None:
    """Where one minus the mean's share of the range is 0 in floats."""
    found = mean_interval(values, low=low, high=high)
    assert low <= found.low <= found.mean <= found.high <= high


def test_one_value_has_no_interval() -> None:
    for interval in (mean_interval([0.75]), bootstrap_interval(torch.tensor([0.75]), generator(0))):
        assert (interval.mean, interval.n, interval.known) == (0.75, 1, False)
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
        assert str(interval) == "0.75 (n=1)"


def test_text() -> None:
    assert str(Interval(0.5, 0.25, 0.625, 8)) == "0.5 ([0.25, 0.625], n=8)"


def test_bootstrap_of_a_fair_coin() -> None:
    # 400 values, half 0 and half 1: a resampled mean is binomial, deviation 1/40, so ±1.96/40 = ±.049.
    values = torch.arange(400) % 2
    interval = bootstrap_interval(values, generator(1), resamples=4000)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.451, abs=0.004)
    assert interval.high == pytest.approx(0.549, abs=0.004)
    assert interval == bootstrap_interval(values, generator(1), resamples=4000)
    wide = bootstrap_interval(values, generator(1), level=0.99, resamples=4000)
    assert wide.low < interval.low < interval.high < wide.high


def test_bootstrap_in_chunks_takes_every_resample() -> None:
    # 3000 values leave 1398 resamples to a chunk: the bounds must still be those of 3000 means.
    values = torch.randn(3000, generator=generator(2), dtype=torch.float64)
    interval = bootstrap_interval(values, generator(3), resamples=3000)
    half = 1.96 * values.std().item() / math.sqrt(3000)
    assert interval.high - interval.mean == pytest.approx(half, rel=0.1)
    assert interval.mean - interval.low == pytest.approx(half, rel=0.1)


def test_student_interval_covers_at_its_level() -> None:
    draws = torch.randn(2000, 3, generator=generator(4), dtype=torch.float64)
    held = sum(i.low <= 0 <= i.high for i in (mean_interval(row) for row in draws.tolist())) / 2000
    assert abs(held - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


@pytest.mark.parametrize(
    ("values", "level", "message"),
    [
        ([], 0.95, r"values have shape \(0,\)"),
        ([1.0, math.nan], 0.95, "values hold nan"),
        ([1.0, math.inf], 0.95, "values hold inf"),
        ([1.0, 2.0], 1.0, r"level=1.0 is not allowed; expected a number in \(0, 1\)"),
    ],
)
def test_refusals(values: list[float], level: float, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        mean_interval(values, level)
    with pytest.raises(InvalidInput, match=message):
        bootstrap_interval(torch.tensor(values), generator(0), level)


def test_bootstrap_refusals() -> None:
    with pytest.raises(InvalidInput, match="resamples=0"):
        bootstrap_interval(torch.ones(3), generator(0), resamples=0)
    with pytest.raises(InvalidInput, match=r"values have shape \(2, 2\)"):
        bootstrap_interval(torch.ones(2, 2), generator(0))


def test_student_interval_of_shares_by_hand() -> None:
    # .1, .5, .9: mean .5, standard error .4 / √3 = .23094, t 4.302653: half .99366; on the logit scale, whose slope
    # at .5 is 4, from 0 -+ 3.97463, so 1 / (1 + e^3.97463) = .01844.
    interval = mean_interval([0.1, 0.5, 0.9], low=0.0, high=1.0)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.018440, abs=1e-5)
    assert interval.high == pytest.approx(1 - 0.018440, abs=1e-5)
    # The same shares of [-1, 3].
    wider = mean_interval([4 * v - 1 for v in (0.1, 0.5, 0.9)], low=-1.0, high=3.0)
    assert wider.low == pytest.approx(4 * interval.low - 1)
    # 1, 2, 3 above 0: half 2.48414, so 2 e^(-+1.24207).
    amounts = mean_interval([1, 2, 3], low=0.0)
    assert (amounts.low, amounts.high) == (
        pytest.approx(2 * math.exp(-1.242069), rel=1e-5),
        pytest.approx(2 * math.exp(1.242069), rel=1e-5),
    )
    below = mean_interval([-1, -2, -3], high=0.0)
    assert (below.low, below.high) == (pytest.approx(-amounts.high), pytest.approx(-amounts.low))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, math.inf), (-math.inf, 1.0)])
def test_no_interval_leaves_the_range(low: float, high: float) -> None:
    ends = [0.0, 1.0, 1e-12, 1 - 1e-12, 0.5, 0.02]
    for first in ends:
        for second in ends:
            for third in ends:
                found = mean_interval([first, second, third], low=low, high=high)
                assert low <= found.low <= found.mean + 1e-12
                assert found.mean - 1e-12 <= found.high <= high
                assert math.isfinite(found.low)
                assert math.isfinite(found.high)


def test_student_interval_of_shares_covers_at_its_level() -> None:
    """Three shares near 1, beyond which every other interval of Student's own would reach."""
    draws = torch.rand(2000, 3, 50, generator=generator(5), dtype=torch.float64) ** 0.02
    shares = draws.mean(2)  # of uniform u, u^.02 has mean 1 / 1.02
    found = [mean_interval(row, low=0.0, high=1.0) for row in shares.tolist()]
    held = sum(i.low <= 1 / 1.02 <= i.high for i in found) / 2000
    assert max(i.high for i in found) < 1.0
    assert abs(held - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_wilsons_interval_by_hand() -> None:
    # 8 of 10 at z = 1.959964: centre (.8 + 3.841459 / 20) / 1.3841459 = .716740, half 1.959964 / 1.3841459 times
    # √(.016 + 3.841459 / 400) = .226577.
    found = share_interval(8, 10)
    assert (found.mean, found.n) == (0.8, 10)
    assert found.low == pytest.approx(0.490162, abs=1e-5)
    assert found.high == pytest.approx(0.943318, abs=1e-5)
    # At the ends: z² / (n + z²), where the bootstrap would have width 0.
    assert share_interval(0, 100) == Interval(0.0, 0.0, pytest.approx(3.841459 / 103.841459, rel=1e-6), 100)
    assert share_interval(100, 100) == Interval(1.0, pytest.approx(100 / 103.841459, rel=1e-6), 1.0, 100)


def test_interval_of_any_metric_is_made_of_its_values() -> None:
    y = (torch.arange(400) % 2).double()

    def share(output: torch.Tensor, truth: torch.Tensor) -> float:
        return float((output == truth).double().mean())

    found = metric_interval(share, torch.zeros(400, dtype=torch.float64), y, generator(1), resamples=4000)
    assert found.mean == 0.5
    assert found.low == pytest.approx(0.451, abs=0.005)
    assert found.high == pytest.approx(0.549, abs=0.005)


def test_a_metric_that_is_no_number_on_what_is_drawn_has_no_interval() -> None:
    def picky(output: torch.Tensor, truth: torch.Tensor) -> float:
        if len(truth.unique()) < 4:
            raise ValueError("too few")
        return 0.5

    # All four of four rows are drawn in 4! / 4^4 = 9 of 100 times.
    found = metric_interval(picky, torch.zeros(4), torch.arange(4), generator(1))
    assert (found.mean, found.known) == (0.5, False)
    assert not metric_interval(lambda o, y: 1.0, torch.zeros(1), torch.zeros(1), generator(1)).known


def test_refusals_of_ranges_and_shares() -> None:
    with pytest.raises(InvalidInput, match=r"values hold 1\.5; expected numbers in \[0, 1\]"):
        mean_interval([0.5, 1.5], low=0.0, high=1.0)
    with pytest.raises(InvalidInput, match=r"low=1\.0 is not allowed; expected less than high=0\.0"):
        mean_interval([0.5], low=1.0, high=0.0)
    with pytest.raises(InvalidInput, match="right=3 is not allowed; expected at most rows=2"):
        share_interval(3, 2)
    with pytest.raises(InvalidInput, match="rows=0"):
        share_interval(0, 0)
