"""SplitGuard: sends wrong labels in some batches, which change an honest server's gradients but not a hijacker's.

Paper: Erdogan, Kupcu, Cicek, "SplitGuard: detecting and mitigating training-hijacking attacks in split learning", WPES
2022.

With F, R1 and R2 the first-layer gradients of the fake batches and of two random halves of the regular ones, R the
average of the halves, theta the angle between two means (radians) and d the absolute difference of two mean norms: S =
(theta(F, R) d(F, R) - theta(R1, R2) d(R1, R2)) / (d(F, R) + d(R1, R2)), and the score is sigmoid(alpha S)^beta: near
one for an honest server, a quarter if wrong labels make no difference. A fake batch replaces a regular one; the client
takes no optimizer step on it, but the server, which cannot recognise it, does. The alarm is raised when the mean of the
last `window` scores is under `threshold`: window 1 is the paper's fast policy, a longer one its vote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.random import generator
from splitfed.core.topology import Topology
from splitfed.detectors.base import Detector, DetectorSite, DetectorState

_GROUPS = ("fake", "one", "two")


@dataclass(frozen=True, kw_only=True)
class SplitGuard(Detector):
    """Sends a fake batch with probability `rate` after `start` batches; `alpha` and `beta` shape the score.

    `threshold`: mean of the last `window` scores below which the alarm is raised.
    """

    start: int = field(default=20, metadata=require_count("splitguard start", low=0))
    rate: float = field(
        default=0.1, metadata=require_number("splitguard rate", low=0.0, high=1.0, open_low=True, open_high=True)
    )
    alpha: float = field(default=5.0, metadata=require_number("splitguard alpha", low=0.0, open_low=True))
    beta: float = field(default=2.0, metadata=require_number("splitguard beta", low=0.0, open_low=True))
    threshold: float = field(default=0.9, metadata=require_number("splitguard threshold", low=0.0, high=1.0))
    window: int = field(default=10, metadata=require_count("splitguard window", low=1))

    def check(self, topology: Topology) -> None:
        """Raise `InvalidInput` for clients without class labels."""
        for head in topology.heads:
            if head.task is not None and head.task.name not in ("classification", "binary"):
                raise InvalidInput(f"splitguard sends wrong classes; the task here is {head.task.name}")

    def watch(self, site: DetectorSite) -> DetectorState:
        """Return the state of the detector at one client."""
        return _SplitGuardState(self, site)


class _SplitGuardState(DetectorState):
    """Sums of gradients and of their norms by group, and the last scores."""

    def __init__(self, plan: SplitGuard, site: DetectorSite) -> None:
        self.plan, self.site = plan, site
        self.group = "one"
        self.sums: dict[str, Tensor] = {}
        self.norms = dict.fromkeys(_GROUPS, 0.0)
        self.counts = dict.fromkeys(_GROUPS, 0)
        self.scores: list[float] = []
        self.last: float | None = None
        self.lowest = 1.0

    def fake(self, rows: Tensor) -> Mapping[str, Tensor] | None:
        """Return random wrong labels with the probability `rate`, else None."""
        random = generator(self.site.seed, "splitguard", self.steps)
        chance, half = torch.rand(2, generator=random, dtype=torch.float64).tolist()
        fake = self.steps >= self.plan.start and chance < self.plan.rate
        self.group = "fake" if fake else ("one", "two")[half < 0.5]
        if not fake:
            return None
        return {name: draw_wrong_labels(y[rows], self.site.classes, random) for name, y in self.site.labels.items()}

    def look(self, gradient: Tensor) -> bool:
        """Add the gradient to its group; after a fake batch, compute the score and drop the optimizer step."""
        group = self.group
        self.sums[group] = self.sums[group] + gradient if group in self.sums else gradient
        self.norms[group] += float(gradient.norm())
        self.counts[group] += 1
        if group != "fake":
            return True
        if all(self.counts.values()):
            means = {name: self.sums[name] / self.counts[name] for name in _GROUPS}
            norms = {name: self.norms[name] / self.counts[name] for name in _GROUPS}
            self.last = score(means, norms, self.plan.alpha, self.plan.beta)
            self.scores = [*self.scores, self.last][-self.plan.window :]
            if len(self.scores) == self.plan.window:
                self.lowest = min(self.lowest, sum(self.scores) / len(self.scores))
            if self.lowest < self.plan.threshold:
                self.alarm()
        return False

    def metrics(self) -> dict[str, Any]:
        """Return the alarm, the last score, the lowest windowed mean so far, and the number of fake batches."""
        return {**super().metrics(), "score": self.last, "lowest": self.lowest, "fakes": self.counts["fake"]}

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        own = {"sums": dict(self.sums), "norms": dict(self.norms), "counts": dict(self.counts)}
        return {**super().state(), **own, "scores": list(self.scores), "last": self.last, "lowest": self.lowest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state`."""
        super().load_state(state)
        self.sums, self.norms, self.counts = dict(state["sums"]), dict(state["norms"]), dict(state["counts"])
        self.scores, self.last, self.lowest = list(state["scores"]), state["last"], state["lowest"]


def draw_wrong_labels(y: Tensor, classes: int, random: torch.Generator) -> Tensor:
    """Return for each label another one, drawn uniformly from the other classes: (rows,)."""
    shift = torch.randint(1, classes, y.shape, generator=random).to(y.device)
    return ((y + shift) % classes).to(y.dtype)


def score(means: Mapping[str, Tensor], norms: Mapping[str, float], alpha: float = 5.0, beta: float = 2.0) -> float:
    """Return the score in (0, 1) of mean gradients and mean norms of the groups "fake", "one" and "two"."""
    regular, length = (means["one"] + means["two"]) / 2, (norms["one"] + norms["two"]) / 2
    apart, between = abs(norms["fake"] - length), abs(norms["one"] - norms["two"])
    if apart + between == 0:
        return math.pow(0.5, beta)
    told = _angle(means["fake"], regular) * apart - _angle(means["one"], means["two"]) * between
    logit = torch.tensor(alpha * told / (apart + between), dtype=torch.float64)
    return math.pow(float(torch.sigmoid(logit)), beta)


def _angle(one: Tensor, two: Tensor) -> float:
    """Return the angle in radians; zero if one of the vectors is zero."""
    lengths = one.norm() * two.norm()
    return float(torch.arccos((one @ two / lengths).clamp(-1, 1))) if float(lengths) > 0 else 0.0
