"""Accountants: exact values, hand-worked sums, Opacus and dp-accounting within a per cent, and calibration."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest

from splitfed.core.errors import InvalidInput
from splitfed.core.privacy_events import Event, Gaussian, Laplace, Neighbours, Protects, Pure, Unit
from splitfed.privacy.accountant_prv import EPSILON_ERROR
from splitfed.privacy.accountant_rdp import renyi, sampled_epsilon
from splitfed.privacy.accountants import calibrate, compose, optimal_pure
from splitfed.privacy.gaussian_mechanism import (
    combine_multipliers,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_multiplier,
)
from tests.examples import assert_refuses
from tests.privacy import loss_grid, privacy_oracle
from tests.thinning import thin


def gaussian(multiplier: float, rate: float = 1.0) -> Event:
    neighbours = Neighbours.REPLACE if rate == 1 else Neighbours.ADD_REMOVE
    return Event(Gaussian(multiplier), Protects.RELEASES, neighbours=neighbours, sampling_rate=rate)


def laplace(multiplier: float) -> Event:
    return Event(Laplace(multiplier), Protects.RELEASES)


def pure(epsilon: float) -> Event:
    return Event(Pure(epsilon), Protects.RELEASES)


def normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize(("multiplier", "epsilon"), [(1.0, 1.0), (0.5, 3.0), (2.0, 0.1), (0.05, 150.0)])
def test_delta_is_the_formula_of_balle_and_wang(multiplier: float, epsilon: float) -> None:
    m = 1 / multiplier
    expected = normal(m / 2 - epsilon / m) - math.exp(epsilon) * normal(-m / 2 - epsilon / m)
    assert gaussian_delta(multiplier, epsilon) == pytest.approx(expected, rel=1e-9)


def test_epsilon_delta_and_multiplier_undo_each_other() -> None:
    for epsilon, delta in itertools.product((0.01, 1.0, 8.0, 60.0), (1e-9, 1e-5, 0.1)):
        multiplier = gaussian_multiplier(epsilon, delta)
        assert gaussian_delta(multiplier, epsilon) <= delta
        assert gaussian_epsilon(multiplier, delta) == pytest.approx(epsilon, rel=1e-6)
        assert gaussian_delta(multiplier * 0.999, epsilon) > delta, "it is the least"


def test_gaussians_add_up_in_inverse_squares() -> None:
    """Three of 3 and one of 4: 3/9 + 1/16 = 19/48."""
    assert combine_multipliers([(3.0, 3), (4.0, 1)]) == pytest.approx(math.sqrt(48 / 19))
    found = compose([(gaussian(2.0), 16)], 1e-5)
    assert found.epsilon == pytest.approx(gaussian_epsilon(0.5, 1e-5), rel=1e-9)
    assert found.method.startswith("exact")


@pytest.mark.parametrize("case", thin(privacy_oracle.CASES, 2))
def test_as_dp_accounting_says(case: str) -> None:
    """Within 1 % of its loss distributions, and with sampling by no more than Opacus's error; RDP as its RDP."""
    cases = privacy_oracle.CASES[case]
    neighbours = Neighbours.REPLACE if all(rate == 1 for _, _, rate, _ in cases) else Neighbours.ADD_REMOVE
    uses = [
        (
            Event(
                {"gaussian": Gaussian, "laplace": Laplace}[kind](noise),
                Protects.RELEASES,
                Unit.EXAMPLE,
                neighbours,
                rate,
            ),
            times,
        )
        for kind, noise, rate, times in cases
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best, rdp = compose(uses, privacy_oracle.DELTA), compose(uses, privacy_oracle.DELTA, "rdp")
    tight = privacy_oracle.epsilon(case, "pld")
    assert rdp.epsilon == pytest.approx(privacy_oracle.epsilon(case, "rdp"), rel=0.01)
    assert best.epsilon == pytest.approx(tight, rel=0.01)
    assert tight * (1 - 1e-4) <= best.epsilon <= tight * (1 + 1e-4) + 1.1 * EPSILON_ERROR
    assert best.epsilon <= rdp.epsilon * 1.001, "a pure bound is told where it is as good"


@pytest.mark.parametrize(
    "uses",
    [
        [(laplace(2.0), 50)],
        [(laplace(5.0), 20), (gaussian(5.0), 20)],
        [(pure(0.5), 20), (gaussian(5.0), 20), (laplace(0.5), 10)],
        [(laplace(0.1), 5), (gaussian(0.1), 1)],
        [(laplace(20.0), 1000)],
    ],
)
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_loss_distribution_is_that_of_another_grid(uses: list[tuple[Event, int]], delta: float) -> None:
    """Within 1 % of an upper bound by a program of our own, and never above the Rényi divergences."""
    rdp = compose(uses, delta, "rdp").epsilon
    reach = compose(uses, delta * 1e-6, "rdp").epsilon
    other = loss_grid.loss_epsilon([(event.mechanism, times) for event, times in uses], delta, reach)
    assert compose(uses, delta, "pld").epsilon == pytest.approx(other, rel=0.01)
    assert compose(uses, delta, "pld").epsilon <= rdp * (1 + 1e-9)


@pytest.mark.parametrize(("multiplier", "times"), [(0.8, 1), (3.0, 10), (20.0, 500)])
def test_loss_distribution_is_just_above_what_is_exact(multiplier: float, times: int) -> None:
    uses = [(gaussian(multiplier), times)]
    exact, found = (compose(uses, 1e-5, name).epsilon for name in ("gaussian", "pld"))
    assert exact <= found <= 1.005 * exact


@pytest.mark.parametrize(("epsilon", "times"), [(0.2, 40), (1.0, 5), (0.01, 1000)])
def test_loss_distribution_of_randomised_response_is_the_binomial_one(epsilon: float, times: int) -> None:
    uses = [(Event(Pure(epsilon), Protects.LABELS, Unit.LABEL), times)]
    exact, found = optimal_pure(epsilon, times, 1e-6), compose(uses, 1e-6, "pld").epsilon
    assert exact * (1 - 1e-9) <= found <= 1.01 * exact


def test_loss_distribution_of_one_laplace_by_hand() -> None:
    """Noise of twice the sensitivity: delta(e) = 1 - exp((e - 1/2) / 2) below e = 1/2 (Balle and Wang 2018)."""
    found = compose([(laplace(2.0), 1)], 1e-3, "pld").epsilon
    by_hand = 0.5 + 2 * math.log(1 - 1e-3)
    assert by_hand <= found <= by_hand + 1e-4


def test_loss_distribution_needs_a_delta_that_rounding_leaves_alone() -> None:
    with pytest.raises(InvalidInput, match="accountant='pld' does not apply"):
        compose([(laplace(2.0), 2)], 1e-12, "pld")


def test_loss_distribution_of_a_sampled_pure_mechanism_is_that_of_what_sampling_leaves_of_it() -> None:
    sampled = Event(Pure(0.7), Protects.RELEASES, neighbours=Neighbours.ADD_REMOVE, sampling_rate=0.2)
    expected = optimal_pure(sampled_epsilon(0.7, 0.2), 30, 1e-6)
    assert expected * (1 - 1e-9) <= compose([(sampled, 30)], 1e-6, "pld").epsilon <= 1.01 * expected


@pytest.mark.parametrize("noise", [1.0, 0.2, 0.01, 0.001])
def test_a_figure_beyond_all_meaning_is_still_a_figure(noise: float) -> None:
    """A thousand uses of Laplace noise far below the sensitivity: no overflow, and never more than the plain sum."""
    found = compose([(laplace(noise), 1000)], 1e-5).epsilon
    assert 100 < found <= 1000 / noise * (1 + 1e-9)


@pytest.mark.parametrize(("rate", "multiplier", "steps"), [(0.01, 1.0, 1000), (0.1, 2.0, 100)])
def test_as_opacus_says(rate: float, multiplier: float, steps: int) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    for name, make in (("rdp", RDPAccountant), ("prv", PRVAccountant)):
        accountant = make()
        accountant.history = [(multiplier, rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = accountant.get_epsilon(1e-5)
            found = compose([(gaussian(multiplier, rate), steps)], 1e-5, name)
        assert found.epsilon == pytest.approx(expected, rel=0.01)


def test_pure_mechanisms_add_up() -> None:
    found = compose([(pure(0.25), 1), (pure(0.5), 2)], 1e-12)
    assert found.epsilon == pytest.approx(1.25)
    assert found.method == "sum of pure epsilons"
    assert compose([(laplace(4.0), 1)], 1e-12).epsilon == pytest.approx(0.25)


def test_equal_pure_mechanisms_are_exact_for_randomised_response() -> None:
    """All 2^6 answers of six coins, by hand: delta = sum of (p - e^epsilon q)+ over outcomes."""
    truth, times, delta = math.exp(0.7) / (1 + math.exp(0.7)), 6, 1e-3
    epsilon = optimal_pure(0.7, times, delta)
    spent = 0.0
    for coins in itertools.product((0, 1), repeat=times):
        heads = sum(coins)
        p = truth**heads * (1 - truth) ** (times - heads)
        q = (1 - truth) ** heads * truth ** (times - heads)
        spent += max(0.0, p - math.exp(epsilon) * q)
    assert spent == pytest.approx(delta, rel=1e-6)
    assert optimal_pure(0.7, 1, 1e-12) == pytest.approx(0.7, rel=1e-9)
    # At a delta of zero nothing but the sum is true.
    assert optimal_pure(0.7, times, 1e-15) == pytest.approx(4.2, rel=1e-6)


def test_the_divergence_of_laplace_noise_by_integration() -> None:
    """log E_q (p/q)^a / (a - 1) on a fine grid, and no shift in two coordinates is worse than in one."""
    x = np.linspace(-60, 60, 2_400_001)
    for order in (1.5, 2.0, 8.0):
        whole = renyi(laplace(2.0), [order])[0]

        def numeric(shift: float, order: float = order) -> float:
            p, q = np.abs(x - shift) / 2, np.abs(x) / 2
            return math.log(float(np.trapezoid(np.exp(-order * p - (1 - order) * q), x)) / 4) / (order - 1)

        assert whole == pytest.approx(numeric(1.0), rel=1e-6)
        assert numeric(0.3) + numeric(0.7) < whole


def test_the_divergence_of_a_pure_mechanism_is_that_of_randomised_response() -> None:
    p = math.exp(0.8) / (1 + math.exp(0.8))
    for order in (1.5, 3.0, 40.0):
        expected = math.log(p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order)) / (order - 1)
        assert renyi(pure(0.8), [order])[0] == pytest.approx(expected, rel=1e-9)
    assert renyi(pure(700.0), [1e6])[0] == pytest.approx(700.0), "no overflow"


def test_sampling_a_pure_mechanism() -> None:
    assert sampled_epsilon(1.0, 0.25) == pytest.approx(math.log(1 + 0.25 * (math.e - 1)))
    assert sampled_epsilon(900.0, 0.5) == pytest.approx(900 + math.log(0.5))


def test_calibration_keeps_to_the_target_and_wastes_nothing() -> None:
    multiplier = calibrate(lambda s: [(gaussian(s), 10)], 3.0, 1e-5)
    assert multiplier == pytest.approx(math.sqrt(10) * gaussian_multiplier(3.0, 1e-5), rel=1e-5)
    assert 2.9999 < compose([(gaussian(multiplier), 10)], 1e-5).epsilon <= 3.0
    with pytest.raises(InvalidInput, match="epsilon=3 is not allowed here: no amount of noise gives it"):
        calibrate(lambda s: [(pure(9.0), 1)], 3.0, 1e-9)


def test_nothing_released_costs_nothing() -> None:
    assert compose([], 1e-5).epsilon == 0
    assert compose([(gaussian(1.0), 0)], 1e-5).epsilon == 0


REFUSED = {
    "delta": (lambda: compose([], 0.0), "delta=0.0 is not allowed; expected a number in (0, 1)"),
    "accountant": (lambda: compose([], 0.1, "rpd"), "unknown accountant 'rpd'; did you mean 'rdp'"),
    "count": (lambda: compose([(pure(1.0), -1)], 0.1), "uses=-1 is not allowed; expected a whole number of at least 0"),
    "neighbours": (
        lambda: compose([(gaussian(1.0), 1), (gaussian(1.0, 0.5), 1)], 0.1),
        "neighbours 'one added or taken away' cannot be added to neighbours 'one replaced by another'",
    ),
    "unit": (
        lambda: compose([(pure(1.0), 1), (Event(Pure(1.0), Protects.RELEASES, Unit.LABEL), 1)], 0.1),
        "unit 'label' cannot be added to unit 'example'",
    ),
    "protects": (
        lambda: compose([(pure(1.0), 1), (Event(Pure(1.0), Protects.LABELS), 1)], 0.1),
        "protects 'labels' cannot be added to protects 'all releases at the cut'",
    ),
    "sampling": (
        lambda: compose([(Event(Gaussian(1.0), Protects.WEIGHTS, sampling_rate=0.5), 1)], 0.1),
        "sampling_rate=0.5 is not allowed with neighbours 'one replaced by another'",
    ),
    "does not apply": (
        lambda: compose([(pure(1.0), 1)], 0.1, "gaussian"),
        "accountant='gaussian' does not apply to these mechanisms; take 'best' or 'rdp'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    assert_refuses(*REFUSED[case])
