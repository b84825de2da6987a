"""Sequential: clients take turns, an epoch each, and hand their segments to the next one.

Paper: Gupta, Raskar, "Distributed learning of deep neural network over multiple agents", JNCA 2018 (its centralised
and its peer-to-peer mode); Vepakomma, Gupta, Swedish, Raskar, "Split learning for health", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.engines.base import Trainer
from splitfed.schedules.base import Round, State, Training
from splitfed.schedules.sampling_and_dropout import dropped_clients, list_clients
from splitfed.schedules.segment_handover import SegmentHandover


@dataclass(frozen=True, kw_only=True)
class Sequential(SegmentHandover):
    """Clients in a fixed order; each trains all its local epochs before the next starts."""

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train every client in turn on its own rows, starting from the segments of the client before."""
        losses = []
        turns = self.turns(engine, training, number)
        for turn in turns:
            self.take_over(engine, turn.client, number, state)
            for epoch, steps in turn.epochs:
                losses += engine.train(turn.client, epoch, steps)
            if turn.finished:
                state["newest"] = turn.client
        return Round(losses, list_clients(turns), dropped_clients(turns))
