"""Intervals: Student t worked by hand, bootstrap against what it must give, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from splitfed.errors import InvalidInput
from splitfed.intervals import Interval, bootstrap_interval, mean_interval
from splitfed.seeding import generator


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
