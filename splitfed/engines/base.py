"""What every engine offers: schedules and runs are written against this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from splitfed.graph import Topology
from splitfed.traffic import Traffic
from splitfed.view import View


@dataclass(frozen=True)
class Prediction:
    """Model outputs by head for a number of rows, and the labels that their holder has for them."""

    outputs: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]


class Engine(Protocol):
    """Places the parties of every lane, runs steps over them, moves weights between them."""

    topology: Topology
    traffic: Traffic

    @property
    def lanes(self) -> int:
        """How many clients there are."""
        ...

    def rows(self, lane: int, part: str) -> int:
        """Return how many rows `lane` has in `part`."""
        ...

    def train(self, lane: int, epoch: int, batches: Sequence[Tensor]) -> list[float]:
        """Train `lane` on `batches` (row numbers of its part "train"); return the total loss of each step."""
        ...

    def predict(
        self,
        lane: int,
        part: str,
        phase: str,
        number: int = 0,
        borrow: int | None = None,
        batch_size: int = 256,
    ) -> Prediction:
        """Run `part` of `lane` forward through the parties in evaluation mode.

        `number` tells one pass from the next, so that the defenses draw afresh.

        `borrow`: the lane whose client segments stand in for the lane's own, as when the experimenter scores the
        newest model on everybody's data; nothing is counted for lending them.
        """
        ...

    def own(self, lane: int, part: str, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> None:
        """Give the data owners of `lane` a further part of data."""
        ...

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Send the weights of `role` from one lane's party to another's, directly or through the party `via`."""
        ...

    def end_round(self) -> None:
        """Tell every party that a round has ended (learning-rate schedulers)."""
        ...

    def view(self, party: str) -> View:
        """Return what was recorded of `party`."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of every party, recorder and counter, by name."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        ...
