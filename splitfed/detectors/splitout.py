"""SplitOut: detects gradients that are outliers among those of honest local training on a few rows.

Paper: Erdogan, Teksen, Celiktenyildiz, Kupcu, Cicek, "SplitOut: out-of-the-box training-hijacking detection in split
learning via outlier detection", CANS 2024.

The client knows the architecture and trains with a local server of its own. A local outlier factor (novelty detection,
one neighbour fewer than gradients) is fitted to the first-layer gradients of that honest training; each gradient from
the real server is then an inlier or an outlier, and the alarm is raised when most of the last `window` are outliers.

The paper trains with one server. Honest gradients depend on the initial weights of the server, and in small models
differ between initialisations: we train with several servers, each drawn afresh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.random import generator
from splitfed.detectors.base import Detector, DetectorSite, DetectorState


@dataclass(frozen=True, kw_only=True)
class SplitOut(Detector):
    """Trains locally on a `share` of the client's rows for `epochs`, with each of `servers` servers.

    `window`: number of gradients that an alarm is decided on.
    """

    share: float = field(default=0.1, metadata=require_number("splitout share", low=0.0, high=1.0, open_low=True))
    epochs: int = field(default=10, metadata=require_count("splitout epochs", low=1))
    servers: int = field(default=5, metadata=require_count("splitout servers", low=1))
    window: int = field(default=10, metadata=require_count("splitout window", low=1))

    def watch(self, site: DetectorSite) -> DetectorState:
        """Return the state of the detector at one client."""
        return _SplitOutState(self, site)


class _SplitOutState(DetectorState):
    """Honest gradients, the outlier factor fitted to them, and the last verdicts."""

    def __init__(self, plan: SplitOut, site: DetectorSite) -> None:
        from sklearn.neighbors import LocalOutlierFactor

        rows = len(next(iter(site.inputs.values())))
        order = torch.randperm(rows, generator=generator(site.seed, "splitout"))
        chosen = order[: max(round(plan.share * rows), min(rows, 2))]
        honest = torch.cat([site.train_locally(chosen, plan.epochs, number) for number in range(plan.servers)])
        if len(honest) < 3:
            raise InvalidInput(
                f"splitout needs three honest gradients or more; share={plan.share:g} and epochs={plan.epochs} of "
                f"{site.client}'s {rows} rows give {len(honest)}"
            )
        self.plan = plan
        self.factor = LocalOutlierFactor(n_neighbors=len(honest) - 1, novelty=True).fit(honest.numpy())
        self.verdicts: deque[bool] = deque(maxlen=plan.window)

    def look(self, gradient: Tensor) -> bool:
        """Classify the gradient as inlier or outlier; the client takes its optimizer step in either case."""
        self.verdicts.append(bool(self.factor.predict(gradient.numpy()[None])[0] < 0))
        if len(self.verdicts) == self.plan.window and self.outliers > 0.5:
            self.alarm()
        return True

    @property
    def outliers(self) -> float:
        """Share of outliers among the last gradients, in [0, 1]."""
        return sum(self.verdicts) / max(len(self.verdicts), 1)

    def metrics(self) -> dict[str, Any]:
        """Return the alarm and the share of outliers in the window."""
        return {**super().metrics(), "outliers": self.outliers}

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs; the rest follows from the seed."""
        return {**super().state(), "verdicts": list(self.verdicts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state`."""
        super().load_state(state)
        self.verdicts = deque(state["verdicts"], maxlen=self.plan.window)
