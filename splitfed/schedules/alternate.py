"""Alternate: clients take turns, a mini-batch each, and hand their segments on after every one.

Paper: Gupta, Raskar, "Distributed learning of deep neural network over multiple agents", JNCA 2018, whose clients take
turns; the turn of a single mini-batch is the "alternate client training" of later comparisons (Thapa et al.,
"SplitFed", AAAI 2022, name it beside the sequential one).

A client with fewer batches than the others is skipped in the last turns of the epoch. The batches that a client trained
before it drops out stay in the segments that it has handed on.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.engines.base import Trainer
from splitfed.schedules.base import Round, State, Training
from splitfed.schedules.sampling_and_dropout import dropped_clients, list_clients
from splitfed.schedules.segment_handover import SegmentHandover


@dataclass(frozen=True, kw_only=True)
class Alternate(SegmentHandover):
    """Clients in a fixed order, one mini-batch at a time."""

    @property
    def accumulates(self) -> bool:
        """False: segments are handed on after every batch, so no optimizer step can stand for several batches."""
        return False

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train one batch of every client in turn until all batches are used."""
        losses = []
        turns = self.turns(engine, training, number)
        for local, epoch in enumerate(training.epochs(number)):
            for step in range(max((len(turn.epochs[local][1]) for turn in turns), default=0)):
                for turn in turns:
                    steps = turn.epochs[local][1]
                    if step < len(steps):
                        self.take_over(engine, turn.client, epoch, state)
                        losses += engine.train(turn.client, epoch, steps[step : step + 1], first=step)
                        state["newest"] = turn.client
        return Round(losses, list_clients(turns), dropped_clients(turns))
