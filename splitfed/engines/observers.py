"""Who may live inside training beside the parties: an attack at one of them, a detector at a client; what they do.

The engine knows no attack and no detector: it calls these at the moments of a step, and keeps their state.
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
    """Reports numbers after every round, and has a state to resume from."""

    def metrics(self) -> dict[str, Any]:
        """Return what is to be known of the round that ends."""


class AttackObserver(Observer, Protocol):
    """Sees what arrives at one party, and stands where that party sends."""

    def receive(self, message: Message) -> None:
        """Look at a message that has arrived."""

    def send(self, message: Message) -> Message:
        """Return what leaves in place of `message`."""

    def step_ended(self) -> None:
        """Act after every party has taken its optimizer step."""


class DetectorObserver(Observer, Protocol):
    """Stands by one client: may send a batch of its own making, and may keep the client from learning of a step."""

    def batch(self, party: Party, batch: Batch, stamp: Stamp) -> Batch:
        """Return the rows to use in place of `batch`."""

    def keeps(self, party: Party) -> bool:
        """Examine the gradients of the step; return whether the client takes its optimizer step."""


class Observable(Protocol):
    """Parties and messages of a run as attacks, poisonings, detectors and recorders are let in on them.

    `training_attacks` and `detectors`: who has been let in, by party.
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
        """Return the party that plays `role` for `replica`, as it trains."""
        return self.run_parties.party(replica, role)

    def join(self, party: str, attack: AttackObserver) -> None:
        """Let `attack` see all that `party` receives, and stand where it sends."""
        self.training_attacks[party] = attack
        self.link.listeners[party] = attack.receive
        self.link.taps[party] = attack.send

    def view(self, party: str) -> View:
        """Return what was recorded of `party`, with the segments it holds."""
        return self.link.recorders.get(party, Recorder(party)).view(self.parties[party].state.modules)

    @contextmanager
    def record_party(self, party: str | None) -> Iterator[Recorder]:
        """Record everything `party` receives inside the block (None: nobody); the run's own recorders rest."""
        recorders, outer = self.link.recorders, self.link.watched
        recorder = Recorder(party or "", budget=2**62)
        self.link.recorders = self.link.watched = {} if party is None else {**outer, party: recorder}
        try:
            yield recorder
        finally:
            self.link.recorders, self.link.watched = recorders, outer
