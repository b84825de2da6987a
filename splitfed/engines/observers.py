"""Who may live inside training beside the parties: an insider at one of them, a sentry by a client; and what they do.

The engine knows no attack and no detector: it calls these at the moments of a step, and keeps their state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from splitfed.core.messages import Message, Stamp
from splitfed.core.party import Party
from splitfed.core.step_state import Batch


class Observer(Protocol):
    """Has numbers to tell after every round, and a state to go on from."""

    def metrics(self) -> dict[str, Any]:
        """Return what is to be known of the round that ends."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state: tensors and plain values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        ...


class AttackObserver(Observer, Protocol):
    """Sees what arrives at one party, and stands where that party sends."""

    def receive(self, message: Message) -> None:
        """Look at a message that has arrived."""
        ...

    def send(self, message: Message) -> Message:
        """Return what leaves in place of `message`."""
        ...

    def step_ended(self) -> None:
        """Act after every party has taken its optimizer step."""
        ...


class DetectorObserver(Observer, Protocol):
    """Stands by one client: may send a batch of its own making, and may keep the client from learning of a step."""

    def batch(self, party: Party, batch: Batch, stamp: Stamp) -> Batch:
        """Return the rows to use in place of `batch`."""
        ...

    def keeps(self, party: Party) -> bool:
        """Look at the gradients of the step; tell whether the client takes its optimizer step."""
        ...
