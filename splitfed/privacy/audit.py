"""A lower bound on epsilon from samples: how well two neighbouring inputs can be distinguished by their releases.

Paper: Jagielski, Ullman, Oprea, "Auditing differentially private machine learning: how private is private SGD?",
NeurIPS 2020; the interval is Clopper and Pearson's.

Under an (epsilon, delta)-private mechanism, every test that accepts one input with probability t and the other with f
has t <= e^epsilon f + delta. A test is chosen on one half of the samples and measured on the other, so its rates have
exact intervals; the implied lower bound on epsilon holds with the stated confidence for any mechanism.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitfed.core.errors import InvalidInput, check_count, check_number

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LowerBound:
    """Result of an audit: a lower bound on epsilon.

    `epsilon`: the lower bound, 0 if the inputs were not distinguished; with the rates of the test and its score.
    """

    epsilon: float
    delta: float
    confidence: float
    accepted: float
    false_alarms: float
    samples: int
    score: str

    @property
    def most(self) -> float:
        """Largest bound that this number of samples can give."""
        alpha = (1 - self.confidence) / 2
        highest = clopper_pearson(0, self.samples, alpha)[1]
        return math.log((clopper_pearson(self.samples, self.samples, alpha)[0] - self.delta) / highest)


def clopper_pearson(hits: int, trials: int, alpha: float) -> tuple[float, float]:
    """Return lower and upper bound on the rate of `hits` in `trials`, each valid with probability 1 - `alpha`."""
    from scipy.stats import beta

    low = 0.0 if hits == 0 else float(beta.ppf(alpha, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(beta.ppf(1 - alpha, hits + 1, trials - hits))
    return low, high


def lower_bound(
    first: dict[str, Array], second: dict[str, Array], delta: float, confidence: float = 0.95
) -> LowerBound:
    """Return the lower bound on epsilon at `delta` from scores of releases of one input and of its neighbour.

    `first`, `second`: name of a score -> (samples,), equally many of each. Half of them choose score, threshold and
    which input to accept; the other half tests. Raises `InvalidInput` for fewer than 20 samples.
    """
    check_number("delta", delta, low=0.0, high=1.0, open_high=True)
    check_number("confidence", confidence, low=0.0, high=1.0, open_low=True, open_high=True)
    count = min(len(scores) for scores in (*first.values(), *second.values()))
    check_count("samples", count, low=20)
    alpha, half = (1 - confidence) / 2, count // 2
    tests = []
    # Either input may be the one to accept, and accepted may be what scores high or what scores low.
    for name, sign, (yes, no) in itertools.product(first, (1.0, -1.0), ((first, second), (second, first))):
        a, b = sign * yes[name], sign * no[name]
        threshold, guess = _threshold(a[:half], b[:half], delta, alpha)
        tests.append((guess, name, threshold, a[half:count], b[half:count]))
    if not tests:
        raise InvalidInput("there is no score to distinguish the inputs by")
    _, name, threshold, a, b = max(tests, key=lambda test: test[0])
    return _tested_bound(int((a >= threshold).sum()), int((b >= threshold).sum()), len(a), delta, confidence, name)


def outcomes_bound(chosen: Counts, tested: Counts, delta: float, confidence: float = 0.95) -> LowerBound:
    """Return the lower bound on epsilon at `delta` from the outcomes of several inputs, all of them neighbours.

    `chosen`, `tested`: (inputs, outcomes) counts. The outcome and the pair of inputs are chosen by the first and tested
    by the second, with equally many samples of every input.
    """
    check_number("delta", delta, low=0.0, high=1.0, open_high=True)
    check_number("confidence", confidence, low=0.0, high=1.0, open_low=True, open_high=True)
    alpha, inputs = (1 - confidence) / 2, len(chosen)
    check_count("inputs", inputs, low=2)
    # (input to accept, the other one, outcome)
    sizes = [int(counts.sum(1).min()) for counts in (chosen, tested)]
    shape = (inputs, *chosen.shape)
    accepted, alarms = (np.broadcast_to(part, shape) for part in (chosen[:, None], chosen[None]))
    guesses = _epsilon(accepted, alarms, sizes[0], delta, alpha)
    guesses[np.arange(inputs), np.arange(inputs)] = -np.inf
    yes, no, outcome = (int(i) for i in np.unravel_index(int(guesses.argmax()), guesses.shape))
    hits, wrong = int(tested[yes, outcome]), int(tested[no, outcome])
    return _tested_bound(hits, wrong, sizes[1], delta, confidence, f"{yes} or {no} by {outcome}")


def _tested_bound(hits: int, alarms: int, n: int, delta: float, confidence: float, score: str) -> LowerBound:
    """Return the lower bound by a test, called `score`, that accepted `hits` of `n` samples, and `alarms` of others."""
    epsilon = float(_epsilon(np.array([hits]), np.array([alarms]), n, delta, (1 - confidence) / 2)[0])
    return LowerBound(max(0.0, epsilon), delta, confidence, hits / n, alarms / n, n, score)


def _threshold(a: Array, b: Array, delta: float, alpha: float) -> tuple[float, float]:
    """Return the threshold on scores `a` and `b` that gives the greatest bound, and that bound."""
    values = np.unique(np.quantile(np.concatenate([a, b]), np.linspace(0, 1, 401)))
    accepted, alarms = ((scores[None] >= values[:, None]).sum(1) for scores in (a, b))
    proved = _epsilon(accepted, alarms, len(a), delta, alpha)
    best = int(np.argmax(proved))
    return float(values[best]), float(proved[best])


def _epsilon(accepted: Counts, alarms: Counts, n: int, delta: float, alpha: float) -> Array:
    """Return the lower bounds implied by the hits in `n` samples of each input; minus infinity if there is none."""
    from scipy.stats import beta

    # Clopper and Pearson's bounds, all at once.
    low = np.where(accepted == 0, 0.0, beta.ppf(alpha, np.maximum(accepted, 1), n - accepted + 1))
    high = np.where(alarms == n, 1.0, beta.ppf(1 - alpha, alarms + 1, np.maximum(n - alarms, 1)))
    with np.errstate(divide="ignore"):
        return np.where(low > delta, np.log(np.maximum(low - delta, 0.0) / high), -np.inf)
