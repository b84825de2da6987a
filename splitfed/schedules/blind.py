"""Blind: one server step on the average of all clients' losses; clients never pass segments to each other.

Paper: Gharibi, Patel, Khademi Habibabadi, et al., "An automated framework for distributed deep learning: a tool demo"
(BlindLearning), 2021.

A batch of every client passes through the shared segments, the losses are averaged (weighted by examples, or equally),
and each party takes one step on that average; only cut gradients are sent back. `average`: an aggregation server also
averages the clients' segments after every round, which the paper offers as an option.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.core.topology import Topology
from splitfed.engines.base import FED, Placement, Source, Trainer
from splitfed.schedules.base import Round, State, Training, client_roles
from splitfed.schedules.joint_step import JointStep, by_rows
from splitfed.schedules.sampling_and_dropout import dropped_clients, examples, list_clients


@dataclass(frozen=True, kw_only=True)
class Blind(JointStep):
    """All clients' losses as one loss; `by_examples` weights each client by its rows, otherwise all count the same."""

    average: bool = False
    by_examples: bool = True
    buffers: bool = True

    def placement(self, topology: Topology) -> Placement:
        """Return an aggregation server if client segments are averaged, otherwise nothing."""
        return self.fusing(Placement((), client_roles(topology) if self.average else (), self.buffers))

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Take joint steps until all batches are used."""
        turns = self.turns(engine, training, number)
        losses: list[float] = []
        averaged = True
        if self.average:
            engine.download(list_clients(turns), number)
        for epoch, step, batches, averaged in self.steps(training, number, turns):
            if not averaged:
                break
            shares = by_rows(batches) if self.by_examples else dict.fromkeys(batches, 1 / len(batches))
            losses += engine.train_together(epoch, step, batches, shares).values()
        averaged = averaged and self.enough(turns)
        if self.average and averaged:
            engine.upload(examples(engine, turns), number)
        return Round(losses, list_clients(turns), dropped_clients(turns), averaged)

    def newest(self, client: int, state: State) -> Source:
        """Return the client's own segments, or the averaged ones if `average` is set."""
        return FED if self.average else client

    def binds(self, clients: int) -> str | None:
        """Return the reason if client segments are averaged, otherwise None."""
        return "averages client segments" if self.average and clients > 1 else None
