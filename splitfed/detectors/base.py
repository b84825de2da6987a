"""The contract of a detector: it works at one client, sees that client's gradients, and raises an alarm.

A detector is a frozen value; `watch` makes its running state at one client. It may send a batch of its
own making in place of one of the client's, and keep the client from learning of it. It knows what the client knows:
its data, its labels, its segments and their gradients, and the architecture of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from splitfed.core.errors import check_fields
from splitfed.core.topology import Topology

LocalTrainer = Callable[[Tensor, int, int], Tensor]
"""Trains the whole model on the client's own machine: on these rows of its training data, for so many epochs, from the
client's weights and those of a server of that number: the gradients of the client's first weights, (steps, weights)."""


@dataclass(frozen=True)
class DetectorSite:
    """What a detector knows at its client: its name, its training rows (as its party holds them, inputs by value
    and labels by head), how many classes there are, `train_locally`, which trains the
    whole model there, and a seed."""  # fmt: skip

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
        """Return labels by head to send with the client's `rows` in place of the true ones, or None to send those."""
        return None

    def judge(self, gradient: Tensor | None) -> bool:
        """Count the step and examine its gradient, if any; return False to drop the client's optimizer step."""
        self.steps += 1
        return True if gradient is None else self.look(gradient)

    def look(self, gradient: Tensor) -> bool:
        """Examine the gradient of the client's first weights, (weights,); return False to drop the optimizer step."""
        raise NotImplementedError

    def alarm(self) -> None:
        """Note the first step at which the server looked malicious."""
        if self.alarmed_at is None:
            self.alarmed_at = self.steps

    def metrics(self) -> dict[str, Any]:
        """Return "alarm" (bool) and "alarmed_at": the client's step, from 1, of the first alarm, or None."""
        return {"alarm": self.alarmed_at is not None, "alarmed_at": self.alarmed_at}

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"steps": self.steps, "alarmed_at": self.alarmed_at}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.steps, self.alarmed_at = state["steps"], state["alarmed_at"]


@dataclass(frozen=True, kw_only=True)
class Detector:
    """Base of all detectors; a subclass writes `watch`."""

    def __post_init__(self) -> None:
        """Refuse parameters that are not what their fields require."""
        check_fields(self)

    def check(self, topology: Topology) -> None:
        """Refuse, before training, a topology in which the detector could not work."""

    def watch(self, site: DetectorSite) -> DetectorState:
        """Return the state of the detector at one client."""
        raise NotImplementedError
