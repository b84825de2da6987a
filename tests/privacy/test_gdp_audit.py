"""The Gaussian audit: published numbers, coverage over a thousand audits, and what it sees of less noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from splitfed.core.errors import InvalidInput
from splitfed.privacy.audit import lower_bound, outcomes_bound
from splitfed.privacy.gaussian_mechanism import gaussian_multiplier
from splitfed.privacy.gdp_audit import gdp_audit, gdp_bounds, least_mu, mu_epsilon

AUDITS = 1000
REFUSED = 0.05 + 3 * math.sqrt(0.05 * 0.95 / AUDITS)
"""The largest share of refused claims that a test of 5 % can be blamed for."""


@pytest.mark.parametrize(("mu", "epsilon"), [(0.5, 1.9931), (1.0, 4.3772), (2.0, 9.9973), (3.0, 16.6755)])
def test_epsilon_of_mu(mu: float, epsilon: float) -> None:
    assert mu_epsilon(mu, 1e-5) == pytest.approx(epsilon, abs=1e-4)


def test_mu_of_counts() -> None:
    """159 errors in 1000 either way are those of mu 2: 1.807 is proved, of which counts alone prove epsilon 1.50."""
    found = least_mu(159, 159, 1000)
    assert found == pytest.approx(1.807, abs=1e-3)
    assert mu_epsilon(found, 1e-5) == pytest.approx(8.83, abs=0.01)
    assert least_mu(500, 500, 1000) == 0
    assert least_mu(0, 0, 1000) == pytest.approx(5.36, abs=0.005)
    assert least_mu(0, 0, 10_000) == pytest.approx(6.75, abs=0.005)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_epsilon_of_a_sampled_gaussian_by_integration(rate: float) -> None:
    """delta = integral of (p - e^eps q)+, for q = N(0, 1) and p with a share `rate` of N(mu, 1)."""
    mu, x = 1.3, np.linspace(-12, 14, 2_000_001)
    epsilon = mu_epsilon(mu, 1e-3, rate)
    normal = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    shifted = np.exp(-((x - mu) ** 2) / 2) / math.sqrt(2 * math.pi)
    with_row = (1 - rate) * normal + rate * shifted
    for p, q, attained in ((with_row, normal, True), (normal, with_row, rate == 1)):
        delta = float(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), x))
        assert delta <= 1e-3 * (1 + 1e-6)
        assert (delta == pytest.approx(1e-3, rel=1e-5)) or not attained
    assert mu_epsilon(40.0, 1e-3, rate) < math.inf
    assert mu_epsilon(mu, max(0.999 * rate, 0.99), 0.5) == 0


def gaussians(mu: float, samples: int, rate: float = 1.0, audits: int = AUDITS) -> tuple[np.ndarray, np.ndarray]:
    """Scores of `audits` audits of a Gaussian mechanism: (1, audits, samples) of both inputs."""
    drawn = np.random.default_rng(int(1000 * mu + samples + 10 * rate))
    first, second = (drawn.standard_normal((1, audits, samples)) for _ in range(2))
    return first + mu * (drawn.random(first.shape) < rate), second


@pytest.mark.parametrize("samples", [200, 1000])
@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_a_thousand_audits_of_a_correct_mechanism(mu: float, samples: int) -> None:
    bounds = gdp_bounds(*gaussians(mu, samples))
    assert (bounds > mu).mean() <= REFUSED
    assert samples < 1000 or np.median(bounds) >= 0.55 * mu, "and they see much of it"


def test_a_thousand_audits_of_what_is_computed_from_a_correct_mechanism() -> None:
    """Rounding and clamping afterwards can only hide: the curve still bounds it."""
    first, second = (np.clip(np.round(scores), -1, 2) for scores in gaussians(1.0, 400))
    assert (gdp_bounds(first, second) > 1.0).mean() <= REFUSED


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_thousand_audits_of_a_sampled_mechanism(rate: float) -> None:
    bounds = gdp_bounds(*gaussians(2.0, 600, rate), rate=rate)
    assert (bounds > 2.0).mean() <= REFUSED
    wide = gdp_bounds(*gaussians(2.0, 20_000, rate, 4), rate=rate)
    assert wide.min() > 1.0
    assert gdp_bounds(*gaussians(2.0, 20_000, 2 * rate, 4), rate=rate).min() > 2.0, "twice the rate is found out"


def test_many_scores_of_noise_prove_nothing() -> None:
    """Thirty scores, none of which tells anything: whoever chose among them by the test itself would find something."""
    drawn = np.random.default_rng(3)
    first, second = (drawn.standard_normal((30, 300, 120)) for _ in range(2))
    assert (gdp_bounds(first, second) > 0).mean() <= 0.05


def test_a_test_is_not_chosen_by_its_own_samples() -> None:
    """The same for the bound that holds for any mechanism: forty fair coins as scores, 15 audits at 80 %."""
    drawn, found = np.random.default_rng(4), 0
    for _ in range(15):
        first, second = ({str(i): drawn.integers(0, 2, 200).astype(float) for i in range(40)} for _ in range(2))
        found += lower_bound(first, second, 0.0, 0.8).epsilon > 0
    assert found <= 15 * 0.2 + 3 * math.sqrt(15 * 0.2 * 0.8)


def test_outcomes_are_not_chosen_by_their_own_samples() -> None:
    """Ten inputs with the same chances of ten outcomes: 90 pairs and ten outcomes to choose from, 200 audits."""
    drawn, equal = np.random.default_rng(5), np.full(10, 0.1)
    found = 0
    for _ in range(200):
        chosen, tested = (drawn.multinomial(100, equal, size=10) for _ in range(2))
        found += outcomes_bound(chosen, tested, 0.0).epsilon > 0
    assert found / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_outcomes_of_randomised_response() -> None:
    """Ten classes, epsilon 2: keep .451, any other .061; the answers themselves show most of it, and never more."""
    keep, drawn = math.exp(2) / (math.exp(2) + 9), np.random.default_rng(6)
    chances = np.full((10, 10), (1 - keep) / 9) + np.eye(10) * (keep - (1 - keep) / 9)
    bounds = []
    for _ in range(200):
        chosen, tested = (np.stack([drawn.multinomial(5000, p) for p in chances]) for _ in range(2))
        bounds.append(outcomes_bound(chosen, tested, 0.0).epsilon)
    assert np.mean(np.array(bounds) > 2.0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    assert np.median(bounds) > 0.8 * 2.0
    with_delta = outcomes_bound(chosen, tested, 0.06).epsilon
    assert with_delta < bounds[-1] - 0.1


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_three_quarters_of_the_noise_are_found_out(epsilon: float) -> None:
    """20 000 samples a side, 50 audits; the right noise passes, and the direct bound sees no difference."""
    delta = 1e-5
    mu = 1 / gaussian_multiplier(epsilon, delta)
    right, short = (gdp_bounds(*gaussians(m, 20_000, audits=50)) for m in (mu, mu / 0.75))
    assert (right > mu).mean() <= 0.05
    assert (short > mu).mean() >= 0.98
    first, second = ({"x": scores[0, 0]} for scores in gaussians(mu / 0.75, 20_000, audits=1))
    found = gdp_audit(first, second, delta)
    assert found.epsilon > epsilon > lower_bound(first, second, delta).epsilon
    assert found.samples == 15_000
    assert found.most == pytest.approx(mu_epsilon(least_mu(0, 0, 15_000), delta))


def test_the_bound_is_at_the_delta_that_is_asked_for() -> None:
    first, second = ({"x": scores[0, 0]} for scores in gaussians(1.0, 4000, audits=1))
    small, large = (gdp_audit(first, second, delta) for delta in (1e-9, 1e-2))
    assert small.mu == large.mu
    assert small.epsilon == pytest.approx(mu_epsilon(small.mu, 1e-9))
    assert large.epsilon == pytest.approx(mu_epsilon(small.mu, 1e-2)) != small.epsilon


def test_what_no_noise_explains_is_without_bound() -> None:
    """Canaries that are always there, where the claim is that they are drawn with chance .1."""
    scores = {"x": np.full(1000, 9.0)}, {"x": np.zeros(1000)}
    assert gdp_audit(*scores, 1e-5, rate=0.1).epsilon == math.inf


REFUSALS = {
    "few": (({"x": np.zeros(19)}, {"x": np.zeros(19)}, 0.1), "samples=19 is not allowed; expected a whole number of"),
    "delta": (({"x": np.zeros(50)}, {"x": np.zeros(50)}, 0.0), r"delta=0.0 is not allowed; expected a number in \(0"),
    "score": (({}, {}, 0.1), "there is no score to distinguish the inputs by"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused(case: str) -> None:
    given, text = REFUSALS[case]
    with pytest.raises(InvalidInput, match=text):
        gdp_audit(*given)
