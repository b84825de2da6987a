"""Contracts of attacks at a party and detectors at a client that take part in training.

The engine knows no particular attack or detector: it calls these methods during a step, and saves their state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from splitfed.core.messages import LocalLink, Message, Recorder, Stamp, View
from splitfed.core.party import Party
from splitfed.core.step_state import Batch
from splitfed.core.topology import Topology
from splitfed.core.traffic import Traffic
from splitfed.engines.base import Stateful
from splitfed.engines.parties import RunParties


class Observer(Stateful, Protocol):
    """Reports metrics after every round, and has a state for resuming."""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the round that ends."""


class AttackObserver(Observer, Protocol):
    """Attack at one party: reads the messages that arrive there, and may change those that the party sends."""

    def receive(self, message: Message) -> None:
        """Process a message that has arrived at the party."""

    def send(self, message: Message) -> Message:
        """Return the message to send in place of `message`."""

    def step_ended(self) -> None:
        """Act after every party has taken its optimizer step."""


class DetectorObserver(Observer, Protocol):
    """Detector at one client: may replace a batch, and may prevent the client's optimizer step."""

    def batch(self, party: Party, batch: Batch, stamp: Stamp) -> Batch:
        """Return the rows to use in place of `batch`."""

    def keeps(self, party: Party) -> bool:
        """Examine the gradients of the step; return whether the client takes its optimizer step."""


class Observable(Protocol):
    """Access of attacks, poisonings, detectors and recorders to the parties and messages of a run.

    `training_attacks` and `detectors`: those that were added, by party.
    """

    topology: Topology
    device: torch.device
    run_parties: RunParties
    parties: dict[str, Party]
    link: LocalLink
    traffic: Traffic
    training_attacks: dict[str, AttackObserver]
    detectors: dict[str, DetectorObserver]

    def party(self, replica: int, role: str) -> Party:
        """Return the party in `role` of `replica`, as it is used in training."""
        return self.run_parties.party(replica, role)

    def join(self, party: str, attack: AttackObserver) -> None:
        """Show `attack` all messages that `party` receives, and let it change those that it sends."""
        self.training_attacks[party] = attack
        self.link.listeners[party] = attack.receive
        self.link.taps[party] = attack.send

    def view(self, party: str) -> View:
        """Return the recorded messages of `party`, with the segments it holds."""
        return self.link.recorders.get(party, Recorder(party)).view(self.parties[party].state.modules)

    @contextmanager
    def record_party(self, party: str | None) -> Iterator[Recorder]:
        """Record all messages that `party` receives within the block (None: none); the run's recorders are paused."""
        recorders, outer = self.link.recorders, self.link.watched
        recorder = Recorder(party or "", budget=2**62)
        self.link.recorders = self.link.watched = {} if party is None else {**outer, party: recorder}
        try:
            yield recorder
        finally:
            self.link.recorders, self.link.watched = recorders, outer
