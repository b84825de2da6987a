"""Where an accountant ends: the next one answers and says why, in little time, and no library's exception comes out."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.core.privacy_events import Event, Gaussian, Laplace, Mechanism, Neighbours, Protects, Pure
from splitfed.privacy import accountant_prv
from splitfed.privacy.accountant_prv import POINTS, prv_epsilon
from splitfed.privacy.accountants import DISTRIBUTION, RENYI, calibrate, compose


def sampled(multiplier: float, rate: float) -> Event:
    return Event(Gaussian(multiplier), Protects.WEIGHTS, neighbours=Neighbours.ADD_REMOVE, sampling_rate=rate)


def whole(mechanism: Mechanism) -> Event:
    return Event(mechanism, Protects.RELEASES)


# Multiplier, rate, steps, delta, and why the tighter accountant is not asked.
ENDS = {
    "a tiny delta": (1.0, 0.01, 1000, 1e-14, "the tighter privacy loss variables do not resolve delta 1e-14"),
    "many steps": (1.0, 1e-3, 10**6, 1e-5, "would take a grid of 7.5e+06 points, and end at 4.2e+06"),
    "very many steps": (1.0, 0.01, 10**12, 1e-5, "would reach epsilon 9.24e+07, and end at 300"),
    "little noise": (0.05, 0.01, 100, 1e-5, "and end at 300"),
    "hardly any noise": (1e-6, 0.01, 100, 1e-5, "and end at 300"),
    "noise beyond the numbers": (1e-200, 0.5, 100, 1e-5, "would reach epsilon inf"),
}


@pytest.mark.parametrize("case", ENDS)
def test_another_accountant_answers_and_says_why(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call of the one that does not apply: the parameters decide, not a clock."""
    multiplier, rate, steps, delta, why = ENDS[case]
    monkeypatch.setattr("opacus.accountants.PRVAccountant", lambda: pytest.fail("composed what it cannot resolve"))
    found = compose([(sampled(multiplier, rate), steps)], delta)
    assert found.method.startswith(f"{RENYI}; the tighter privacy loss variables ")
    assert why in found.method
    assert found.epsilon == compose([(sampled(multiplier, rate), steps)], delta, "rdp").epsilon
    assert found.epsilon > 1
    with pytest.raises(InvalidInput, match=r"accountant='prv' does not apply: the privacy loss variables .*; take"):
        compose([(sampled(multiplier, rate), steps)], delta, "prv")


def test_the_refusal_by_name_is_one_line() -> None:
    text = (
        "accountant='prv' does not apply: the privacy loss variables do not resolve delta 1e-14; take 'best' or 'rdp'"
    )
    with pytest.raises(InvalidInput, match=f"^{re.escape(text)}$"):
        compose([(sampled(1.0, 0.01), 1000)], 1e-14, "prv")


def test_the_grid_that_is_foreseen_is_the_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth: what is refused for its size would have had it."""
    from opacus.accountants.analysis.prv import Domain

    sizes = []
    real = Domain.create_aligned.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Domain, "create_aligned", classmethod(lambda c, *given: sizes.append(real(c, *given)) or sizes[-1])
    )
    uses = [(sampled(0.8, 0.02), 400)]
    assert isinstance(prv_epsilon(uses, 1e-6), float)
    monkeypatch.setattr(accountant_prv, "POINTS", 10)
    foreseen = prv_epsilon(uses, 1e-6)
    assert isinstance(foreseen, str)
    (points,) = re.findall(r"grid of (\S+) points", foreseen)
    assert float(points) == pytest.approx(sizes[0].size, rel=0.1)
    assert sizes[0].size < POINTS


@pytest.mark.parametrize("error", [ValueError("rounding\nsecond line"), RuntimeError(), ZeroDivisionError("by zero")])
def test_no_exception_of_a_library_comes_out(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> float:
        raise error

    monkeypatch.setattr("opacus.accountants.PRVAccountant.get_epsilon", fails)
    uses = [(sampled(1.1, 0.03), 77)]
    found = compose(uses, 1e-5)
    assert found.method.startswith(f"{RENYI}; the tighter privacy loss variables do not resolve it (")
    assert "\n" not in found.method
    with pytest.raises(InvalidInput, match="accountant='prv' does not apply"):
        compose(uses, 1e-5, "prv")


@pytest.mark.parametrize("accountant", ["best", "prv"])
def test_no_epsilon_is_below_zero(accountant: str) -> None:
    assert compose([(sampled(2.0, 0.1), 10)], 0.9, accountant).epsilon == 0


def test_the_search_for_noise_passes_where_an_accountant_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way to it the noise is too little for the loss variables; where it ends they hold, or it is refused."""

    def tighter(uses: Sequence[tuple[Event, int]], delta: float) -> float | str:
        epsilon = 0.9 * compose(uses, delta, "rdp").epsilon
        return epsilon if epsilon < 6.2 else "privacy loss variables end at 6"

    monkeypatch.setattr("splitfed.privacy.accountants.prv_epsilon", tighter)
    asked: list[float] = []

    def make(multiplier: float) -> list[tuple[Event, int]]:
        asked.append(multiplier)
        return [(sampled(multiplier, 0.02), 2)]

    multiplier = calibrate(make, 6.0, 1e-4, "prv")
    assert 5.999 < compose(make(multiplier), 1e-4, "prv").epsilon <= 6.0
    with pytest.raises(InvalidInput, match="accountant='prv' does not apply: the privacy loss variables end at 6"):
        compose(make(min(asked)), 1e-4, "prv")
    with pytest.raises(InvalidInput, match="accountant='prv' does not apply: the privacy loss variables end at 6"):
        calibrate(make, 100.0, 1e-4, "prv")


def test_some_sampled_and_some_not() -> None:
    """The loss variables know sampled ones alone; the distribution takes both, and tighter than the divergences."""
    uses = [(sampled(2.0, 0.1), 3), (sampled(2.0, 1.0), 3)]
    found = compose(uses, 1e-5)
    assert found.method == DISTRIBUTION
    assert compose(uses[1:], 1e-5).epsilon < found.epsilon < 0.99 * compose(uses, 1e-5, "rdp").epsilon
    with pytest.raises(InvalidInput, match="accountant='prv' does not apply to these mechanisms"):
        compose(uses, 1e-5, "prv")


def test_without_sampling_the_loss_distribution_ends_too() -> None:
    few = compose([(whole(Laplace(2.0)), 100), (whole(Gaussian(3.0)), 5)], 1e-12)
    assert few.method == f"{RENYI}; the tighter privacy loss distribution does not resolve delta 1e-12"
    loud = compose([(whole(Laplace(0.01)), 100), (whole(Gaussian(0.1)), 5)], 1e-5)
    assert re.search("the tighter privacy loss distribution would reach epsilon .* and ends at 300", loud.method)
    many = compose([(whole(Laplace(1e6)), 10**7), (whole(Gaussian(3.0)), 5)], 1e-5)
    assert many.method == f"{RENYI}; the tighter privacy loss distribution would compose 1e+07 uses, and ends at 1e+06"


@pytest.mark.parametrize("multiplier", [1e-5, 1e-7, 1e-40, 1e-160, 1e-200, 5e-324])
def test_a_gaussian_with_hardly_any_noise(multiplier: float) -> None:
    """Its loss is normal, of mean m²/2 for m = 1 / multiplier; infinite where that leaves the numbers."""
    found = compose([(whole(Gaussian(multiplier)), 1)], 1e-5).epsilon
    half = 0.5 / multiplier / multiplier if multiplier > 1e-300 else math.inf
    assert found >= half * (1 - 1e-9)
    assert found == pytest.approx(half, rel=1e-4) or math.isinf(half)


@pytest.mark.parametrize("mechanism", [Pure(sys.float_info.max), Pure(1e300), Laplace(1e-300), Laplace(5e-324)])
@pytest.mark.parametrize("times", [1, 5, 10**7])
def test_pure_mechanisms_beyond_the_numbers(mechanism: Mechanism, times: int) -> None:
    assert compose([(whole(mechanism), times)], 1e-5).epsilon >= 1e299
    assert compose([(whole(Pure(1e-9)), 10**9)], 1e-5).epsilon <= 1.0
