"""Toy reverse: clients take turns from the last to the first, and nothing is handed over.

Paper: none; an example of a plug-in.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.engines.base import Trainer
from splitfed.schedules.base import Round, State, Training
from splitfed.schedules.sampling_and_dropout import Sampled, list_clients


@dataclass(frozen=True, kw_only=True)
class ToyReverse(Sampled):
    """Every client trains its local epochs, the last client first."""

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train every client on its own rows."""
        losses = []
        turns = self.turns(engine, training, number)
        for turn in reversed(turns):
            for epoch, steps in turn.epochs:
                losses += engine.train(turn.client, epoch, steps)
        return Round(losses, list_clients(turns))
