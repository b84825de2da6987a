"""One line of an audit: two neighbouring inputs, how their scores are drawn, and the claim that they may refute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from splitfed.core.privacy_events import Event, Gaussian
from splitfed.privacy.accountants import SUM, Bound, compose
from splitfed.privacy.audit import Array, LowerBound, lower_bound
from splitfed.privacy.gdp_audit import GaussianFound, gdp_audit, mu_epsilon

Json = dict[str, Any]
Scores = dict[str, Array]

Draw = Callable[[int, int], Scores]
"""From which input, the first (0) or the second (1), and how many releases, to their scores."""

ONE, TEN = "one release", "ten releases in a row"

SLACK = 0.02
"""How far a measured distance may lie above the claim: what the estimate of the noise's deviation leaves open."""


class SensitivityCheck(NamedTuple):
    """A sensitivity: what was `measured` over so many `pairs`, what is `claimed`, in which `norm`, to what `slack`."""

    norm: str
    measured: float
    claimed: float
    pairs: int
    slack: float = 1e-5

    @property
    def held(self) -> bool:
        """Whether no pair was further apart than claimed."""
        return self.measured <= self.claimed * (1 + self.slack)


Measure = Callable[[], SensitivityCheck | None]


@dataclass(frozen=True)
class Game:
    """What is audited, by whose mechanism at which place, and on which canaries.

    `claim`: the events with how often each is used. `draw(which, trials)` returns the scores of that many releases of
    the first (0) or second (1) input; or `judge(trials, confidence, delta)` the bound itself. `measure`: of the
    sensitivity, where there is a claim of it. `share`: one in so many of the trials is enough.
    """

    party: str
    place: str
    mechanism: str
    audited: str
    canaries: str
    claim: tuple[tuple[Event, int], ...]
    draw: Draw | None = None
    judge: Callable[[int, float, float], LowerBound] | None = None
    measure: Measure | None = None
    share: int = 1

    @property
    def gaussian(self) -> bool:
        """Whether the claim is that of a Gaussian trade-off curve, or of one use of a sampled Gaussian."""
        alone = sum(times for _, times in self.claim) == 1
        return all(isinstance(e.mechanism, Gaussian) and (alone or e.sampling_rate == 1) for e, _ in self.claim)

    @property
    def rate(self) -> float:
        """The chance that the row takes part."""
        return self.claim[0][0].sampling_rate

    def claimed(self, delta: float) -> Bound:
        """Return what the events cost together."""
        if self.gaussian and self.rate < 1:
            (event, _), *_ = self.claim
            assert isinstance(event.mechanism, Gaussian)
            epsilon = mu_epsilon(1 / event.mechanism.noise_multiplier, delta, event.sampling_rate)
            return Bound(epsilon, delta, "exact for one step of a sampled Gaussian (Balle, Barthe, Gaboardi 2018)")
        return compose(self.claim, delta)

    def play(self, trials: int, delta: float, confidence: float) -> Json:
        """Return what was found with `trials` releases of each input (a part of them where one is a long row).

        "epsilon_held": whether the bound on epsilon, "sensitivity": whether the measured distance, is within the claim;
        "held": whether both are, and "refuted" that one of them is not.
        """
        claimed = self.claimed(delta)
        # A claim without a delta is held to what it says.
        at = 0.0 if claimed.method == SUM else delta
        found = self._bound(max(40, trials // self.share), delta, at, confidence)
        measured = None if self.measure is None else self.measure()
        return {
            **{name: getattr(self, name) for name in ("party", "place", "mechanism", "audited", "canaries")},
            "found": {
                name: _finite_or_none(value) if isinstance(value, float) else value
                for name, value in asdict(found).items()
            },
            "most": _finite_or_none(found.most),
            "claimed": _finite_or_none(claimed.epsilon),
            "delta": at,
            "method": claimed.method,
            "sensitivity": None if measured is None else {**measured._asdict(), "held": measured.held},
            "epsilon_held": (epsilon_held := found.epsilon <= claimed.epsilon),
            "held": (held := epsilon_held and (measured is None or measured.held)),
            "refuted": not held,
        }

    def _bound(self, trials: int, delta: float, at: float, confidence: float) -> LowerBound | GaussianFound:
        """Return the bound on epsilon; that of a Gaussian curve at `delta`, any other at `at`, that of its claim."""
        if self.judge is not None:
            return self.judge(trials, confidence, at)
        assert self.draw is not None
        first, second = (self.draw(which, trials) for which in (0, 1))
        if self.gaussian:
            return gdp_audit(first, second, delta, confidence, self.rate)
        return lower_bound(first, second, at, confidence)


def format_line(line: Mapping[str, Any]) -> str:
    """Return a line of what `Game.play` found as text for people."""
    found, sensitivity = line["found"], line["sensitivity"]
    text = (
        f"{line['party']}, {line['place']}, {line['mechanism']}, {line['audited']}, {line['canaries']}: epsilon is at "
        f"least {_format_epsilon(found['epsilon'])} by {found['samples']} samples of each input; claimed "
        f"{_format_epsilon(line['claimed'])} at delta {line['delta']:.1g}: "
        f"{'holds' if line['epsilon_held'] else 'violated'}; a claim of up to "
        f"{_format_epsilon(line['most'])} could have been refuted"
    )
    if sensitivity is None:
        return text
    return (
        f"{text}\n  {sensitivity['norm']} measured over {sensitivity['pairs']} pairs: {sensitivity['measured']:.6g}, "
        f"claimed {sensitivity['claimed']:.6g}: {'holds' if sensitivity['held'] else 'violated'}"
    )


def class_names(defenses: Sequence[object]) -> str:
    """Return the names of what acts, in its order."""
    return ", ".join(type(one).__name__ for one in defenses)


def _format_epsilon(epsilon: float | None) -> str:
    return "any number" if epsilon is None else f"{epsilon:.4g}"


def _finite_or_none(value: float) -> float | None:
    # JSON knows no infinity.
    return value if math.isfinite(value) else None
