"""The contract of a detector: it examines the gradients that one client receives, and raises an alarm.

A detector is a frozen value; `watch` creates its running state at one client. It may replace the labels of a batch, and
drop the client's optimizer step for it. It knows what the client knows: its data, its labels, its segments and their
gradients, and the architecture of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from splitfed.core.errors import check_fields
from splitfed.core.topology import Topology

LocalTrainer = Callable[[Tensor, int, int], Tensor]
"""Trains the whole model on the client's own machine: (rows, epochs, server) -> gradients (steps, weights).

`rows`: positions of training rows; `server`: number of the local server, which determines its initial weights. Training
starts from the client's current weights; the gradients are those of the client's first weights.
"""


@dataclass(frozen=True)
class DetectorSite:
    """What a detector knows at its client.

    Its name, its training rows (as its party holds them, inputs by value and labels by head), the number of classes,
    `train_locally`, which trains the whole model there, and a seed.
    """

    client: str
    inputs: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    classes: int
    train_locally: LocalTrainer
    seed: int


class DetectorState:
    """Running state of a detector at one client; this base sends the true labels and never raises an alarm."""

    alarmed_at: int | None = None
    steps: int = 0

    def fake(self, rows: Tensor) -> Mapping[str, Tensor] | None:
        """Return labels by head to send with the client's `rows` instead of the true ones; None sends the true ones."""
        return None

    def judge(self, gradient: Tensor | None) -> bool:
        """Count the step and examine its gradient, if any; return False to drop the client's optimizer step."""
        self.steps += 1
        return True if gradient is None else self.look(gradient)

    def look(self, gradient: Tensor) -> bool:
        """Examine the gradient of the client's first weights, (weights,); return False to drop the optimizer step."""
        raise NotImplementedError

    def alarm(self) -> None:
        """Record the current step as that of the first alarm, unless there was one before."""
        if self.alarmed_at is None:
            self.alarmed_at = self.steps

    def metrics(self) -> dict[str, Any]:
        """Return "alarm" (bool) and "alarmed_at": the client's step, from 1, of the first alarm, or None."""
        return {"alarm": self.alarmed_at is not None, "alarmed_at": self.alarmed_at}

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"steps": self.steps, "alarmed_at": self.alarmed_at}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state`."""
        self.steps, self.alarmed_at = state["steps"], state["alarmed_at"]


@dataclass(frozen=True, kw_only=True)
class Detector:
    """Base of all detectors; a subclass writes `watch`."""

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters that violate the requirements in their fields' metadata."""
        check_fields(self)

    def check(self, topology: Topology) -> None:
        """Raise `InvalidInput`, before training, for a topology in which the detector cannot work."""

    def watch(self, site: DetectorSite) -> DetectorState:
        """Return the state of the detector at one client."""
        raise NotImplementedError
