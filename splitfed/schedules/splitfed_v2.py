"""SplitFed v2: clients in random order through one shared server segment; their own segments are averaged.

Paper: Thapa, Chamikara, Camtepe, Sun, "SplitFed: when federated learning meets split learning", AAAI 2022, section on
SplitFedV2.

The server's segment is trained by every client in turn and never averaged; each client starts the round from the
averaged client segment. `buffers`: True averages batch-norm statistics with the weights; False leaves them with each
client.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitfed.core.random import generator
from splitfed.core.topology import Topology
from splitfed.engines.base import Placement, Trainer
from splitfed.schedules.base import Round, State, Training, client_roles
from splitfed.schedules.sampling_and_dropout import Averaged, dropped_clients, examples, list_clients


@dataclass(frozen=True, kw_only=True)
class SplitFedV2(Averaged):
    """One server segment for all clients, which train one after another in an order drawn anew each round."""

    buffers: bool = True
    averages_clients = True

    def placement(self, topology: Topology) -> Placement:
        """Return an aggregation server for the clients' segments."""
        return self.fusing(Placement((), client_roles(topology), self.buffers))

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train one round: send averaged segments down, train in random order, send them up and average."""
        turns = self.turns(engine, training, number)
        engine.download(list_clients(turns), number)
        order = torch.randperm(len(turns), generator=generator(training.seed, "turns", number)).tolist()
        drawn = [(turns[place].client, epoch, steps) for place in order for epoch, steps in turns[place].epochs]
        losses = [loss for turn in drawn for loss in engine.train(*turn)]
        if averaged := self.enough(turns):
            engine.upload(examples(engine, turns), number)
        return Round(losses, list_clients(turns), dropped_clients(turns), averaged)
