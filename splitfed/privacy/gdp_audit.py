"""A lower bound on a Gaussian mechanism's epsilon from samples; tighter than `audit`, which holds for any mechanism.

Paper: Nasr, Hayes, Steinke, Balle, Tramèr, Jagielski, Carlini, Terzis, "Tight auditing of differentially private
machine learning", USENIX Security 2023; Dong, Roth, Su, "Gaussian differential privacy", JRSS B 2022, for the trade-off
curve.

Every test of two neighbours under Gaussian noise of multiplier 1 / mu, or under post-processing of it, has errors with
Phi^-1(1 - false alarms) - Phi^-1(misses) <= mu, at every threshold. So two error rates with exact intervals give a
lower bound on mu, which has an epsilon at any delta, for any number of samples. Score and threshold are chosen on the
first quarter of the samples and tested on the rest. Where the row takes part by chance with a known `rate`, the curve
is that of the sampled Gaussian: hits <= (1 - rate) alarms + rate Phi(Phi^-1(alarms) + mu).

The bound can refute the claim of a Gaussian mechanism. For a mechanism with another trade-off curve it is not a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from splitfed.core.errors import InvalidInput, check_count, check_number
from splitfed.privacy.audit import Array, Counts
from splitfed.privacy.gaussian_mechanism import gaussian_epsilon

CHOICE = 4
"""One of this many samples is used to choose the test."""

THRESHOLDS = 41


@dataclass(frozen=True)
class GaussianFound:
    """Result of an audit in terms of Gaussian differential privacy.

    `mu`: its lower bound, 0 if the inputs were not distinguished; `epsilon`: its value at `delta`. `misses` and
    `false_alarms`: error rates of the test among `samples` of each input; `rate`: probability that the row takes part.
    """

    epsilon: float
    mu: float
    delta: float
    confidence: float
    misses: float
    false_alarms: float
    samples: int
    score: str
    rate: float = 1.0

    @property
    def most(self) -> float:
        """Largest bound that this number of samples can give."""
        mean = np.array([round((1 - self.rate) * self.samples)])
        mu = float(_mu_bound(mean, np.zeros(1, dtype=np.int64), self.samples, 1 - self.confidence, self.rate)[0])
        return mu_epsilon(mu, self.delta, self.rate)


def mu_epsilon(mu: float, delta: float, rate: float = 1.0) -> float:
    """Return the exact epsilon at `delta` of one use of the Gaussian mechanism of multiplier 1 / `mu`, mu >= 0.

    `rate`: probability in (0, 1] that the row takes part; neighbours differ by one added or removed row (Balle, Barthe,
    Gaboardi, "Privacy amplification by subsampling", NeurIPS 2018, theorem 8, which is tight).
    """
    if mu <= 0 or delta >= rate:
        return 0.0
    if mu == math.inf:
        return math.inf
    epsilon = gaussian_epsilon(1 / mu, delta / rate)
    # log(1 + rate (e^eps - 1)), written so that a large epsilon does not overflow.
    return max(0.0, epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon)))


def gdp_audit(
    first: Mapping[str, Array], second: Mapping[str, Array], delta: float, confidence: float = 0.95, rate: float = 1.0
) -> GaussianFound:
    """Return the audit of a Gaussian mechanism from scores of releases of one input and of its neighbour.

    `first`, `second`: name of a score -> (samples,), equally many of each; if `rate` < 1, `first` are those of the
    input with the row. Raises `InvalidInput` for fewer than 20 samples.
    """
    check_number("delta", delta, low=0.0, high=1.0, open_low=True, open_high=True)
    check_number("confidence", confidence, low=0.0, high=1.0, open_low=True, open_high=True)
    check_number("rate", rate, low=0.0, high=1.0, open_low=True)
    names = list(first)
    if not names:
        raise InvalidInput("there is no score to distinguish the inputs by")
    count = min(len(scores) for scores in (*first.values(), *second.values()))
    check_count("samples", count, low=20)
    a, b = (np.stack([given[name][:count] for name in names])[:, None] for given in (first, second))
    mu, chosen, misses, alarms = _choose_and_test(a, b, 1 - confidence, rate)
    samples = count - count // CHOICE
    bound = max(0.0, float(mu[0]))
    score = names[int(chosen[0])]
    return GaussianFound(
        mu_epsilon(bound, delta, rate),
        bound,
        delta,
        confidence,
        int(misses[0]) / samples,
        int(alarms[0]) / samples,
        samples,
        score,
        rate,
    )


def gdp_bounds(first: Array, second: Array, confidence: float = 0.95, rate: float = 1.0) -> Array:
    """Return the lower bounds on mu of many audits at once: (audits,). `first`, `second`: (scores, audits, samples)."""
    return np.maximum(_choose_and_test(first, second, 1 - confidence, rate)[0], 0.0)


def least_mu(misses: int, alarms: int, samples: int, confidence: float = 0.95, rate: float = 1.0) -> float:
    """Return the lower bound on mu from error counts in `samples` of each input, at a threshold fixed in advance."""
    return max(0.0, float(_mu_bound(np.array([misses]), np.array([alarms]), samples, 1 - confidence, rate)[0]))


def _choose_and_test(first: Array, second: Array, alpha: float, rate: float) -> tuple[Array, Counts, Counts, Counts]:
    """Return bounds, chosen scores, misses and alarms of each audit; the first samples choose, the others test."""
    cut = first.shape[-1] // CHOICE
    sign, threshold, score = _choose_test(first[..., :cut], second[..., :cut], alpha, rate)
    audits = np.arange(first.shape[1])
    a, b = (sign[:, None] * given[score, audits, cut:] for given in (first, second))
    misses, alarms = (a < threshold[:, None]).sum(1), (b >= threshold[:, None]).sum(1)
    return _mu_bound(misses, alarms, a.shape[1], alpha, rate), score, misses, alarms


def _choose_test(first: Array, second: Array, alpha: float, rate: float) -> tuple[Array, Array, Counts]:
    """Return sign, threshold and score with the greatest bound: (audits,) each."""
    pooled = np.concatenate([first, second], axis=-1)
    bounds, thresholds = [], []
    for sign in (1.0, -1.0):
        at = np.moveaxis(np.quantile(sign * pooled, np.linspace(0, 1, THRESHOLDS), axis=-1), 0, -1)
        # One threshold after the other, to hold no more than a copy of the samples.
        misses = np.stack([(sign * first < at[..., i : i + 1]).sum(-1) for i in range(THRESHOLDS)], -1)
        alarms = np.stack([(sign * second >= at[..., i : i + 1]).sum(-1) for i in range(THRESHOLDS)], -1)
        bounds.append(_mu_bound(misses, alarms, first.shape[-1], alpha, rate))
        thresholds.append(at)
    # (audits, scores x signs x thresholds)
    bound_of_test, at = (np.stack(part, axis=2).transpose(1, 0, 2, 3) for part in (bounds, thresholds))
    best = bound_of_test.reshape(len(bound_of_test), -1).argmax(1)
    scores, signs, places = np.unravel_index(best, bound_of_test.shape[1:])
    return np.where(signs == 0, 1.0, -1.0), at[np.arange(len(at)), scores, signs, places], scores


def _mu_bound(misses: Counts, alarms: Counts, samples: int, alpha: float, rate: float) -> Array:
    """Return the lower bound on mu from errors in `samples` of each input, with confidence 1 - `alpha`.

    May be negative.
    """
    from scipy.special import ndtri

    missed, alarmed = (_rate_bound(errors, samples, alpha / 2) for errors in (misses, alarms))
    if rate == 1:
        return np.asarray(-ndtri(alarmed) - ndtri(missed))
    # What those hits that are not due to chance are, of the releases that the row is in.
    hits = np.clip((1 - missed - (1 - rate) * alarmed) / rate, 0.0, 1.0)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(ndtri(hits) - ndtri(alarmed), nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def _rate_bound(hits: Counts, trials: int, alpha: float) -> Array:
    """Return the upper bound on the rate of `hits` in `trials` with probability 1 - `alpha` (Clopper and Pearson)."""
    from scipy.special import betaincinv

    different, where = np.unique(hits, return_inverse=True)
    high = np.where(different == trials, 1.0, betaincinv(different + 1, np.maximum(trials - different, 1), 1 - alpha))
    return np.asarray(high[where].reshape(hits.shape))
