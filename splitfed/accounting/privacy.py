"""What many uses of private mechanisms cost together, by every accountant that applies; the best valid bound counts.

Paper: Balle, Wang, ICML 2018 (Gaussians, exactly); Mironov, CSF 2017 (any mixture, by Rényi divergences); Gopi, Lee,
Wutschitz, "Numerical composition of differential privacy", NeurIPS 2021 (sampled Gaussians, by Opacus); Koskela, Jälkö,
Honkela, AISTATS 2020 (mixtures without sampling, by the loss itself); Kairouz, Oh,
Viswanath, "The composition theorem for differential privacy", ICML 2015 (equal pure mechanisms, exactly for the worst
of them); the sum of epsilons for pure mechanisms.

Every figure holds for uses that are chosen adaptively.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from splitfed.accounting.privacy_loss import LEAST_DELTA, MOST_REACH, loss_epsilon
from splitfed.accounting.privacy_renyi import (
    ORDERS,
    SAMPLED_ORDERS,
    pure_epsilon,
    renyi,
    renyi_epsilon,
    sampled_epsilon,
)
from splitfed.errors import InvalidInput, check_count, check_number, unknown
from splitfed.gaussian_mechanism import gaussian_epsilon, joined_multiplier
from splitfed.privacy import Event, Gaussian, Neighbours

ACCOUNTANTS = ("best", "gaussian", "rdp", "pld", "prv", "pure")

SUM = "sum of pure epsilons"

Uses = tuple[tuple[Event, int], ...]


@dataclass(frozen=True)
class Bound:
    """All uses together are (`epsilon`, `delta`)-private; `method` says who says so."""

    epsilon: float
    delta: float
    method: str


def compose(uses: Iterable[tuple[Event, int]], delta: float, accountant: str = "best") -> Bound:
    """Return what `uses`, events with how often each is used, cost together at `delta` in (0, 1).

    `accountant`: "best" of all that apply, or one of "gaussian" (exact, Gaussian mechanisms without sampling), "rdp"
    (everything), "pld" (mechanisms without sampling), "prv" (Gaussian mechanisms with sampling) and "pure"
    (mechanisms with an epsilon of their own). Raises `InvalidInput` for events that cannot be added, and where the
    accountant does not apply.
    """
    check_number("delta", delta, low=0.0, high=1.0, open_low=True, open_high=True)
    if accountant not in ACCOUNTANTS:
        raise unknown("accountant", accountant, ACCOUNTANTS)
    counted: Counter[Event] = Counter()
    for event, times in uses:
        check_count("uses", times)
        counted[event] += times
    kept = tuple((event, times) for event, times in counted.items() if times)
    _check_alike([event for event, _ in kept])
    return _compose(kept, float(delta), accountant) if kept else Bound(0.0, delta, "nothing was released")


def calibrate(
    make: Callable[[float], Iterable[tuple[Event, int]]], epsilon: float, delta: float, accountant: str = "best"
) -> float:
    """Return the least noise multiplier (to one in a million) with which the uses `make` returns cost `epsilon`.

    `make(multiplier)` returns events with counts; more noise must cost less.
    """
    from scipy.optimize import brentq

    check_number("epsilon", epsilon, low=0.0, open_low=True)

    def excess(exponent: float) -> float:
        return compose(make(math.exp(exponent)), delta, accountant).epsilon - epsilon

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
    return math.exp(float(brentq(excess, low, high, xtol=5e-7)) + 1e-6)


@lru_cache(maxsize=4096)
def _compose(uses: Uses, delta: float, accountant: str) -> Bound:
    sampled = any(event.sampling_rate < 1 for event, _ in uses)
    gaussian = all(isinstance(event.mechanism, Gaussian) for event, _ in uses)
    pure = all(not isinstance(event.mechanism, Gaussian) for event, _ in uses)
    found: list[Bound] = []
    if gaussian and not sampled and accountant in ("best", "gaussian"):
        found.append(_exact(uses, delta))
    if pure and accountant in ("best", "pure"):
        found += _pure(uses, delta)
    # Nothing is better than what is exact.
    if accountant == "rdp" or (accountant == "best" and not (gaussian and not sampled)):
        found.append(_renyi(uses, delta))
    several = sum(times for _, times in uses) > 1
    if not sampled and (accountant == "pld" or (accountant == "best" and several and not gaussian)):
        found += _losses(uses, delta)
    if gaussian and sampled and all(e.sampling_rate < 1 for e, _ in uses) and accountant in ("best", "prv"):
        found.append(_prv(uses, delta))
    if not found:
        raise InvalidInput(f"accountant={accountant!r} does not apply to these mechanisms; take 'best' or 'rdp'")
    # What holds without a delta is told where something else is better by a hair only.
    return min(found, key=lambda bound: bound.epsilon * (0.999 if bound.method == SUM else 1))


def _exact(uses: Uses, delta: float) -> Bound:
    joined = joined_multiplier((e.mechanism.noise_multiplier, n) for e, n in uses if isinstance(e.mechanism, Gaussian))
    return Bound(gaussian_epsilon(joined, delta), delta, "exact for Gaussians (Balle and Wang 2018)")


def _renyi(uses: Uses, delta: float) -> Bound:
    orders = SAMPLED_ORDERS if any(event.sampling_rate < 1 for event, _ in uses) else ORDERS
    total = np.sum([times * renyi(event, orders) for event, times in uses], axis=0)
    epsilon, _ = renyi_epsilon(orders, total, delta)
    return Bound(epsilon, delta, "Rényi divergences (Mironov 2017)")


def _losses(uses: Uses, delta: float) -> list[Bound]:
    """By the loss itself, where delta is not so small that rounding would show, and epsilon not beyond all meaning."""
    reach = min(bound.epsilon for bound in (_renyi(uses, delta * 1e-6), *_pure_sum(uses)))
    if delta < LEAST_DELTA or reach > MOST_REACH:
        return []
    epsilon = loss_epsilon([(event.mechanism, times) for event, times in uses], delta, reach)
    return [Bound(epsilon, delta, "privacy loss distribution (Koskela et al. 2020)")]


def _pure_sum(uses: Uses) -> list[Bound]:
    """What they cost without a delta, where each has an epsilon of its own."""
    if any(isinstance(event.mechanism, Gaussian) for event, _ in uses):
        return []
    return [Bound(math.fsum(pure_epsilon(e.mechanism) * n for e, n in uses), 0.0, SUM)]


def _prv(uses: Uses, delta: float) -> Bound:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [
        (e.mechanism.noise_multiplier, e.sampling_rate, n) for e, n in uses if isinstance(e.mechanism, Gaussian)
    ]
    # Opacus returns the upper end of what the numerical error allows.
    return Bound(float(accountant.get_epsilon(delta=delta)), delta, "privacy loss variables (Gopi et al. 2021)")


def _pure(uses: Uses, delta: float) -> list[Bound]:
    each = [(sampled_epsilon(pure_epsilon(event.mechanism), event.sampling_rate), times) for event, times in uses]
    found = [Bound(math.fsum(epsilon * times for epsilon, times in each), delta, SUM)]
    if len({epsilon for epsilon, _ in each}) == 1 and sum(times for _, times in each) > 1:
        epsilon = optimal_pure(each[0][0], sum(times for _, times in each), delta)
        found.append(Bound(epsilon, delta, "equal pure mechanisms (Kairouz, Oh, Viswanath 2015)"))
    return found


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
    """Refuse events whose epsilons mean different things."""
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
