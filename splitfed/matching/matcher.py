"""ExpertMatcher: selects the expert, and the classes, that fit a client's data, from low-dimensional codes.

Paper: Sharma, Vepakomma, Swedish, Chang, Kalpathy-Cramer, Raskar, "ExpertMatcher: Automating ML Model Selection for
Clients using Hidden Representations", 2019 (arXiv 1910.03731), and "... for Users in Resource Constrained Countries",
2019 (arXiv 1910.02312).

The server sends every expert's encoder, the client answers with codes. Coarse assignment: the expert with the best
unmodified score by one of the `MEASURES`. Fine assignment: for each row the class of that expert whose mean code has
the largest cosine with the row's. Whether any expert fits is decided by a `Rejection`, fitted on held-out data of the
repository; its examples of a misfit are the other experts' data, so a misfit that resembles an expert more than any
other expert does may be accepted.

A rejection is a logistic regression on the scores. Its weights are non-negative, so that a better score never lowers
the probability, also far from the fitted data. Scores are transformed by the inverse hyperbolic sine, linear near zero
and logarithmic far away, to limit the influence of outliers. This part is ours: whether the authors reject clients, and
by which classifier, is not known.

Only the abstracts were available (see `autoencoder` and `measures`). Known deviations: one decision is made for all
rows of a client, not one for each (use clients of a single row for that), and a client can be rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, check_count, check_names
from splitfed.core.messages import LocalLink, Message, Recorder, Stamp
from splitfed.core.random import generator
from splitfed.core.traffic import Traffic
from splitfed.matching.client import Client
from splitfed.matching.measures import MEASURES
from splitfed.matching.repository import Expert, Repository
from splitfed.matching.similarity import cosine


@dataclass(frozen=True, eq=False)
class Match:
    """Result of matching: the `expert` with the best of the `scores` (higher is better), and each row's class there.

    `classes`: (rows,) int64 labels of the expert's data. `matched`: whether the best expert fits, that is `probability`
    is at least a half.
    """

    expert: Expert
    scores: Mapping[str, float]
    classes: Tensor
    matched: bool
    probability: float


@dataclass(frozen=True, eq=False)
class _Calibration:
    """Calibration for sets of one size: mean and deviation of each expert's scores on its own data, and the rejection.

    Means and deviations are (features,).
    """

    means: Mapping[str, Tensor]
    deviations: Mapping[str, Tensor]
    rejection: Rejection

    def probability(self, expert: str, scores: Tensor) -> float:
        """Return the probability that `scores` (sets, features) under `expert` come from data like its own."""
        standard = (scores.mean(0) - self.means[expert]) / self.deviations[expert]
        return float(self.rejection.probability(standard))


@guard_constructor
class Matcher:
    """The server's side of matching: holds the repository, sends encoders, and assigns clients.

    `measure` decides the assignment; `evidence` (default: that measure alone): the measures by which a match is
    distinguished from a misfit. A client's rows are scored in sets of `rows`, or fewer if it or an expert's held-out
    part has fewer, and the sets' scores are averaged; rows that fill no set are left out. `trials`: number of sets that
    calibrate an expert.
    """

    name = "matcher"

    def __init__(
        self,
        repository: Repository,
        measure: str = "cosine",
        *,
        evidence: Sequence[str] | None = None,
        rows: int = 32,
        trials: int = 32,
        seed: int = 0,
    ) -> None:
        """Raise `InvalidInput` for unknown measures, evidence the client does not send, and fewer than two experts."""
        names = (measure,) if evidence is None else tuple(evidence)
        for name in (measure, *names):
            check_names("measure", MEASURES, name)
            if MEASURES[name].on_errors != MEASURES[measure].on_errors:
                raise InvalidInput(
                    f"evidence {name!r} is not allowed with measure={measure!r}; one reads errors, one codes"
                )
        if not names:
            raise InvalidInput("evidence is empty; expected at least one measure")
        if len(repository) < 2:
            raise InvalidInput(f"the repository has {len(repository)} experts; matching needs at least two")
        check_count("rows", rows, low=max(MEASURES[name].least for name in (measure, *names)))
        check_count("trials", trials, low=2)
        self.repository = repository
        self.measure, self.evidence = measure, names
        self.rows, self.trials, self.seed = rows, trials, seed
        self._experts = dict(repository.experts)
        self._on_errors = MEASURES[measure].on_errors
        self._calibrations: dict[int, _Calibration] = {}

    def match(self, client: Client, *, traffic: Traffic | None = None, recorders: Sequence[Recorder] = ()) -> Match:
        """Send the encoders, receive from `client` the values that the measure needs, and return the assignment.

        Every message is counted by `traffic` and passed to that of the `recorders`, one a party, whose party receives
        it.
        """
        if client.shape != self.repository.shape:
            raise InvalidInput(f"{client.name} has rows of {client.shape}; the experts take {self.repository.shape}")
        link = LocalLink(traffic or Traffic(), {recorder.party: recorder for recorder in recorders})
        stamps = (Stamp("match", 0, 0, number) for number in count())
        for expert in self._experts.values():
            client.receive(link.deliver(self._encoder(expert, client.name, next(stamps))))
        ask = client.errors if self._on_errors else client.codes
        values = {name: link.deliver(ask(name, self.name, next(stamps))).tensors[name] for name in self._experts}
        scores = self.score(values)
        best = max(scores, key=lambda name: scores[name])
        codes = values[best]
        if self._on_errors:
            codes = link.deliver(client.codes(best, self.name, next(stamps))).tensors[best]
        return self._assign(best, scores, values[best], codes)

    def match_codes(self, codes: Mapping[str, Tensor]) -> Match:
        """Return the assignment of given codes: expert -> (rows, d), for all experts; read as float32.

        The rows have one order under all experts.
        """
        if self._on_errors:
            raise InvalidInput(f"measure={self.measure!r} needs errors beside codes; give the client to match()")
        given = {name: value.detach().to("cpu", torch.float32) for name, value in codes.items()}
        scores = self.score(given)
        best = max(scores, key=lambda name: scores[name])
        return self._assign(best, scores, given[best], given[best])

    def score(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Return each expert's score; `values` are its codes (n, d), or errors (n,) if the measure reads those."""
        self._check(values)
        return {name: float(self._scores(name, values[name], (self.measure,)).mean()) for name in self._experts}

    def _assign(self, best: str, scores: Mapping[str, float], values: Tensor, codes: Tensor) -> Match:
        expert = self._experts[best]
        nearest = cosine(codes, expert.reference.means).argmax(1)
        calibration = self._calibration(self._rows_per_score(len(values)))
        probability = calibration.probability(best, self._scores(best, values, self.evidence))
        return Match(expert, scores, expert.reference.labels[nearest], probability >= 0.5, probability)

    def _check(self, values: Mapping[str, Tensor]) -> None:
        check_names("expert", self._experts, *values)
        least = max(MEASURES[name].least for name in (self.measure, *self.evidence))
        for name, expert in self._experts.items():
            width = () if self._on_errors else (expert.reference.means.shape[1],)
            shape = tuple(values[name].shape) if name in values else None
            if shape is None or shape[1:] != width or shape[0] < least:
                expected_shape = f"({', '.join(['rows', *map(str, width)])}), at least {least} rows"
                raise InvalidInput(f"the values for expert {name!r} have shape {shape}; expected {expected_shape}")
            if not bool(torch.isfinite(values[name]).all()):
                raise InvalidInput(f"the values for expert {name!r} are not finite; expected finite numbers")
        counts = {name: len(value) for name, value in values.items()}
        if len(set(counts.values())) > 1:
            raise InvalidInput(f"rows by expert are {counts}; expected the same rows under every encoder")

    def _rows_per_score(self, rows: int) -> int:
        return min(rows, self.rows, *(len(expert.held_out) for expert in self._experts.values()))

    def _scores(self, name: str, values: Tensor, measures: Sequence[str]) -> Tensor:
        """Return the scores (sets, measures), float64, of `values` cut into sets."""
        reference, size = self._experts[name].reference, self._rows_per_score(len(values))
        sets = values.split(size)[: len(values) // size]
        rows = [[MEASURES[measure].score(part, reference) for measure in measures] for part in sets]
        return torch.tensor(rows, dtype=torch.float64)

    def _calibration(self, size: int) -> _Calibration:
        """Return the calibration for sets of `size` rows, computed at the first call."""
        if size not in self._calibrations:
            trial_scores = {name: self._trial_scores(name, size) for name in self._experts}
            means = {name: scores[name].mean(0) for name, scores in trial_scores.items()}
            # Scores that never vary (sets that are the whole held-out part) would divide by zero.
            deviations = {name: scores[name].std(0).clamp_min(1e-6) for name, scores in trial_scores.items()}
            standard = [
                ((scores[judge] - means[judge]) / deviations[judge], owner == judge)
                for owner, scores in trial_scores.items()
                for judge in self._experts
            ]
            features = torch.cat([scores for scores, _ in standard])
            matches = torch.tensor([match for scores, match in standard for _ in scores])
            self._calibrations[size] = _Calibration(means, deviations, fit_rejection(features, matches))
        return self._calibrations[size]

    def _trial_scores(self, owner: str, size: int) -> dict[str, Tensor]:
        """Return each expert's scores of sets drawn from `owner`'s held-out rows: expert -> (trials, features)."""
        random = generator(self.seed, "matcher", "trials", owner, size)
        rows = self._experts[owner].held_out
        drawn = torch.cat([rows[torch.randperm(len(rows), generator=random)[:size]] for _ in range(self.trials)])
        scores = {}
        for judge, expert in self._experts.items():
            values = expert.errors(drawn) if self._on_errors else expert.codes(drawn)
            scores[judge] = torch.cat([self._scores(judge, part, self.evidence) for part in values.split(size)])
        return scores

    def _encoder(self, expert: Expert, receiver: str, stamp: Stamp) -> Message:
        """Return a copy of the expert's encoder as a message, with its decoder where the client measures errors."""
        parts = ("encoder.", "decoder.") if self._on_errors else ("encoder.",)
        state = expert.autoencoder.state_dict()
        tensors = {f"{expert.name}/{n}": t.clone() for n, t in state.items() if n.startswith(parts)}
        return Message(self.name, receiver, "weights", "matcher->encoder", tensors, stamp)


@dataclass(frozen=True)
class Rejection:
    """Probability of a match: the logistic function of `bias` + `weights` . asinh(scores), weights >= 0."""

    weights: tuple[float, ...]
    bias: float

    def probability(self, scores: Tensor) -> Tensor:
        """Return the probability of a match, (...,) in [0, 1], for standardised `scores` (..., features)."""
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return torch.sigmoid(scores.double().asinh() @ weights + self.bias)


def fit_rejection(scores: Tensor, matches: Tensor) -> Rejection:
    """Return the rejection fitted to `scores` (n, features) and `matches` (n,) bool by penalised maximum likelihood.

    Both classes have the same total weight; the penalty is |weights|² / 2 on a likelihood that is summed over n, as in
    scikit-learn's C = 1. The problem is convex: the result depends on the data alone.
    """
    if bool(matches.all()) or not bool(matches.any()):
        raise InvalidInput("matches are all true or all false; expected some of each")
    # SciPy takes a second to import.
    from scipy.optimize import minimize

    x = scores.double().asinh().numpy()
    y = matches.numpy().astype(np.float64)
    share = np.where(y > 0, 0.5 / y.mean(), 0.5 / (1 - y.mean()))

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        weights, signed = theta[1:], 2 * y - 1
        margin = signed * (x @ weights + theta[0])
        pull = -share * signed * np.exp(-np.logaddexp(0, margin))
        value = float((share * np.logaddexp(0, -margin)).sum() + weights @ weights / 2)
        return value, np.concatenate([[pull.sum()], x.T @ pull + weights])

    bounds = [(None, None), *[(0, None)] * x.shape[1]]
    solution = minimize(loss, np.zeros(x.shape[1] + 1), jac=True, method="L-BFGS-B", bounds=bounds)
    return Rejection(tuple(float(w) for w in solution.x[1:]), float(solution.x[0]))
