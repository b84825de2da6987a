"""SplitOut: a client trains the whole model locally on a few rows; gradients unlike those it got there are outliers.

Paper: Erdogan, Teksen, Celiktenyildiz, Kupcu, Cicek, "SplitOut: out-of-the-box training-hijacking detection in split
learning via outlier detection", CANS 2024.

The client knows the architecture and makes a server of its own. The first-layer gradients of that honest training teach
a local outlier factor (novelty detection, as many neighbours as there are gradients, less one); each gradient that the
real server causes is then in or out, and the server is called malicious when most of the last `window` are out.

The paper trains with one server. What an honest gradient looks like depends on the weights a server starts from, and
one start is no guide to another in small models: we train with several, each started afresh.
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
    """Train at home on a `share` of the client's rows for `epochs`, `servers` times; decide over `window` gradients."""

    share: float = field(default=0.1, metadata=require_number("splitout share", low=0.0, high=1.0, open_low=True))
    epochs: int = field(default=10, metadata=require_count("splitout epochs", low=1))
    servers: int = field(default=5, metadata=require_count("splitout servers", low=1))
    window: int = field(default=10, metadata=require_count("splitout window", low=1))

    def watch(self, site: DetectorSite) -> DetectorState:
        """Return the state of the detector at one client."""
        return _SplitOutState(self, site)


class _SplitOutState(DetectorState):
    """Honest gradients, the outlier factor they teach, and the last verdicts."""

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
        """Judge the gradient; the client learns of it all the same."""
        self.verdicts.append(bool(self.factor.predict(gradient.numpy()[None])[0] < 0))
        if len(self.verdicts) == self.plan.window and self.outliers > 0.5:
            self.alarm()
        return True

    @property
    def outliers(self) -> float:
        """The share of the last gradients that were out."""
        return sum(self.verdicts) / max(len(self.verdicts), 1)

    def metrics(self) -> dict[str, Any]:
        """Return the alarm and the share of outliers in the window."""
        return {**super().metrics(), "outliers": self.outliers}

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: the rest follows from the seed."""
        return {**super().state(), "verdicts": list(self.verdicts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        super().load_state(state)
        self.verdicts = deque(state["verdicts"], maxlen=self.plan.window)
