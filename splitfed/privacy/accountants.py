"""Composition of private mechanisms: the least of the valid bounds of all accountants that apply.

Paper: Balle, Wang, ICML 2018 (Gaussians, exactly); Mironov, CSF 2017 (any mixture, by Rényi divergences); Gopi, Lee,
Wutschitz, "Numerical composition of differential privacy", NeurIPS 2021 (sampled Gaussians, by Opacus); Koskela, Jälkö,
Honkela, AISTATS 2020 (other mixtures, by the loss itself, by dp-accounting); Kairouz, Oh, Viswanath, "The composition
theorem for differential privacy", ICML 2015 (equal pure mechanisms, exactly for the worst of them); the sum of epsilons
for pure mechanisms.

Every figure holds for adaptively chosen uses. Whether an accountant applies is decided from the parameters, not from
elapsed time; if a tighter one does not apply, Rényi divergences are used, and the method of the bound states the
reason.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from splitfed.core.errors import InvalidInput, check_count, check_names, check_number
from splitfed.core.privacy_events import Event, Gaussian, Neighbours
from splitfed.privacy.accountant_pld import LEAST_DELTA, MOST_REACH, MOST_USES, loss_epsilon
from splitfed.privacy.accountant_prv import NAME as VARIABLES, prv_epsilon
from splitfed.privacy.accountant_rdp import (
    ORDERS,
    SAMPLED_ORDERS,
    pure_epsilon,
    renyi,
    renyi_epsilon,
    sampled_epsilon,
)
from splitfed.privacy.gaussian_mechanism import combine_multipliers, gaussian_epsilon

ACCOUNTANTS = ("best", "gaussian", "rdp", "pld", "prv", "pure")

SUM = "sum of pure epsilons"
RENYI = "Rényi divergences (Mironov 2017)"
DISTRIBUTION = "privacy loss distribution (Koskela et al. 2020)"

_LEAST_MULTIPLIER = 1e-6  # below it the exact formula is a difference of two equal numbers
_MOST_EQUAL = 10**6  # equal pure mechanisms whose answers are counted one by one

UsageCounts = tuple[tuple[Event, int], ...]


@dataclass(frozen=True)
class Bound:
    """An (`epsilon`, `delta`) bound on all uses together.

    `method`: the accountant that gives it, and why a tighter one did not apply, if so.
    """

    epsilon: float
    delta: float
    method: str


def compose(uses: Iterable[tuple[Event, int]], delta: float, accountant: str = "best") -> Bound:
    """Return the privacy bound at `delta` in (0, 1) on the composition of `uses`, events with counts.

    `accountant`: "best" of all that apply, or one of "gaussian" (exact, Gaussian mechanisms without sampling), "rdp"
    (everything), "pld" (everything), "prv" (Gaussian mechanisms with sampling) and "pure" (mechanisms with a pure
    epsilon). Raises `InvalidInput` for events that cannot be composed, and for a named accountant that does not apply.
    """
    return _check_and_compose(uses, delta, accountant, stand_in=False)


def _check_and_compose(uses: Iterable[tuple[Event, int]], delta: float, accountant: str, stand_in: bool) -> Bound:
    check_number("delta", delta, low=0.0, high=1.0, open_low=True, open_high=True)
    check_names("accountant", ACCOUNTANTS, accountant)
    totals: Counter[Event] = Counter()
    for event, times in uses:
        check_count("uses", times)
        totals[event] += times
    used = tuple((event, times) for event, times in totals.items() if times)
    _check_alike([event for event, _ in used])
    return _compose(used, float(delta), accountant, stand_in) if used else Bound(0.0, delta, "nothing was released")


def calibrate(
    make: Callable[[float], Iterable[tuple[Event, int]]], epsilon: float, delta: float, accountant: str = "best"
) -> float:
    """Return the least noise multiplier (to one in a million) at which the uses `make` returns cost `epsilon`.

    `make(multiplier)` returns events with counts; their cost must fall with the multiplier. Raises `InvalidInput` if
    the epsilon is met without noise, or by no noise.
    """
    from scipy.optimize import brentq

    check_number("epsilon", epsilon, low=0.0, open_low=True)

    def excess(exponent: float) -> float:
        # On the way an accountant may not apply, for want of noise; where the search ends it must.
        found = _check_and_compose(make(math.exp(exponent)), delta, accountant, stand_in=True).epsilon
        return min(found, sys.float_info.max) - epsilon

    low, high = 0.0, 0.0
    while excess(low) < 0:
        low -= 1
        if low < -20:
            raise InvalidInput(f"epsilon={epsilon:g} is not allowed here: it is met without noise")
    while excess(high) > 0:
        high += 1
        if high > 20:
            raise InvalidInput(f"epsilon={epsilon:g} is not allowed here: no amount of noise gives it at {delta:g}")
    # A millionth above the root, so that the target is kept.
    multiplier = math.exp(float(brentq(excess, low, high, xtol=5e-7)) + 1e-6)
    compose(make(multiplier), delta, accountant)
    return multiplier


@lru_cache(maxsize=4096)
def _compose(uses: UsageCounts, delta: float, accountant: str, stand_in: bool) -> Bound:
    """Return the bound; with `stand_in` Rényi divergences replace a named accountant that does not apply."""
    rates = [event.sampling_rate for event, _ in uses]
    sampled = min(rates) < 1
    gaussian = all(isinstance(event.mechanism, Gaussian) for event, _ in uses)
    pure = all(not isinstance(event.mechanism, Gaussian) for event, _ in uses)
    several = sum(times for _, times in uses) > 1
    answers: list[Bound | str] = []
    if gaussian and not sampled and accountant in ("best", "gaussian"):
        answers.append(_gaussian_bound(uses, delta))
    if pure and accountant in ("best", "pure"):
        answers += _pure_bounds(uses, delta)
    # Nothing is better than what is exact.
    if accountant == "rdp" or (accountant == "best" and not (gaussian and not sampled)):
        answers.append(_rdp_bound(uses, delta))
    if gaussian and max(rates) < 1 and accountant in ("best", "prv"):
        answers.append(_prv_bound(uses, delta))
    elif accountant == "pld" or (accountant == "best" and several and (sampled or not gaussian)):
        answers.append(_pld_bound(uses, delta))
    bounds = [one for one in answers if isinstance(one, Bound)]
    obstacles = [one for one in answers if isinstance(one, str)]
    if not bounds and obstacles and stand_in:
        bounds = [_rdp_bound(uses, delta)]
    if not bounds:
        why = f": the {obstacles[0]}" if obstacles else " to these mechanisms"
        raise InvalidInput(f"accountant={accountant!r} does not apply{why}; take 'best' or 'rdp'")
    # What holds without a delta is told where something else is better by a hair only.
    best = min(bounds, key=lambda bound: bound.epsilon * (0.999 if bound.method == SUM else 1))
    if best.method == RENYI and obstacles:
        return replace(best, method=f"{RENYI}; the tighter {obstacles[0]}")
    return best


def _gaussian_bound(uses: UsageCounts, delta: float) -> Bound:
    gaussians = [(e.mechanism.noise_multiplier, n) for e, n in uses if isinstance(e.mechanism, Gaussian)]
    mean = math.hypot(*(math.sqrt(n) / sigma for sigma, n in gaussians))
    if mean > 1 / _LEAST_MULTIPLIER:
        # The loss is normal with mean m²/2 and deviation m.
        epsilon = mean * mean / 2 + mean * math.sqrt(2 * math.log(1 / delta))
        return Bound(epsilon, delta, "Gaussian tail of the privacy loss")
    return Bound(
        gaussian_epsilon(combine_multipliers(gaussians), delta), delta, "exact for Gaussians (Balle and Wang 2018)"
    )


def _rdp_bound(uses: UsageCounts, delta: float) -> Bound:
    orders = SAMPLED_ORDERS if any(event.sampling_rate < 1 for event, _ in uses) else ORDERS
    with np.errstate(over="ignore"):
        total = np.sum([times * renyi(event, orders) for event, times in uses], axis=0)
    epsilon, _ = renyi_epsilon(orders, total, delta)
    return Bound(epsilon, delta, RENYI)


def _pld_bound(uses: UsageCounts, delta: float) -> Bound | str:
    """Return the bound by privacy loss distributions, or why it does not apply."""
    if delta < LEAST_DELTA:
        return f"privacy loss distribution does not resolve delta {delta:g}"
    reach = min(bound.epsilon for bound in (_rdp_bound(uses, delta * 1e-6), *_pure_sum(uses)))
    if not reach <= MOST_REACH:
        return f"privacy loss distribution would reach epsilon {reach:.3g}, and ends at {MOST_REACH:g}"
    if (times := sum(times for _, times in uses)) > MOST_USES:
        return f"privacy loss distribution would compose {times:.2g} uses, and ends at {MOST_USES:g}"
    return Bound(loss_epsilon(uses, delta, reach), delta, DISTRIBUTION)


def _prv_bound(uses: UsageCounts, delta: float) -> Bound | str:
    epsilon = prv_epsilon(uses, delta)
    return epsilon if isinstance(epsilon, str) else Bound(epsilon, delta, VARIABLES)


def _pure_sum(uses: UsageCounts) -> list[Bound]:
    """Return the sum of pure epsilons as a bound without a delta; empty if a mechanism has none."""
    if any(isinstance(event.mechanism, Gaussian) for event, _ in uses):
        return []
    return [Bound(_sum_epsilons((pure_epsilon(e.mechanism), n) for e, n in uses), 0.0, SUM)]


def _pure_bounds(uses: UsageCounts, delta: float) -> list[Bound]:
    each = [(sampled_epsilon(pure_epsilon(event.mechanism), event.sampling_rate), times) for event, times in uses]
    found = [Bound(_sum_epsilons(each), delta, SUM)]
    times = sum(times for _, times in each)
    if len({epsilon for epsilon, _ in each}) == 1 and 1 < times <= _MOST_EQUAL and found[0].epsilon < math.inf:
        epsilon = optimal_pure(each[0][0], times, delta)
        found.append(Bound(epsilon, delta, "equal pure mechanisms (Kairouz, Oh, Viswanath 2015)"))
    return found


def _sum_epsilons(each: Iterable[tuple[float, int]]) -> float:
    """Return the sum of epsilons times counts; infinity on overflow."""
    try:
        return math.fsum(epsilon * times for epsilon, times in each)
    except OverflowError:
        return math.inf


def optimal_pure(epsilon: float, times: int, delta: float) -> float:
    """Return the exact epsilon at `delta` of `times` randomised responses of `epsilon`, the worst pure mechanism."""
    from scipy.optimize import brentq
    from scipy.stats import binom

    heads = np.arange(times + 1)
    # The privacy loss is (2 h - times) epsilon for h truthful answers out of `times`.
    chances = binom.pmf(heads, times, 1 / (1 + math.exp(-epsilon)))
    losses = (2 * heads - times) * epsilon

    def excess(at: float) -> float:
        above = losses > at
        return float(np.sum(chances[above] * -np.expm1(at - losses[above]))) - delta

    top = times * epsilon
    if excess(0.0) <= 0:
        return 0.0
    return min(top, float(brentq(excess, 0.0, top, xtol=1e-12, rtol=1e-12)) * (1 + 1e-10)) if excess(top) < 0 else top


def _check_alike(events: list[Event]) -> None:
    """Raise `InvalidInput` for events that protect different things, or have different units or neighbours."""
    for event in events[1:]:
        for name in ("protects", "unit", "neighbours"):
            mine, first = getattr(event, name), getattr(events[0], name)
            if mine != first:
                raise InvalidInput(f"{name} {str(mine)!r} cannot be added to {name} {str(first)!r}: list them apart")
    for event in events:
        if event.sampling_rate < 1 and event.neighbours is Neighbours.REPLACE:
            raise InvalidInput(
                f"sampling_rate={event.sampling_rate:g} is not allowed with neighbours {str(event.neighbours)!r}: "
                "sampling is accounted for where one is added or taken away"
            )
