"""SplitFed v1: clients in parallel, a copy of the server's segment for each; both sides are averaged every round.

Paper: Thapa, Chamikara, Camtepe, Sun, "SplitFed: when federated learning meets split learning", AAAI 2022,
algorithms 1 and 2.

The aggregation server, a party of its own, averages the clients' segments (they cross as messages: one down at the
start of a round, one up at its end); the main server averages its copies. Both are weighted by examples. Optimizer
state lives as long as its segment. `buffers`: whether batch-norm statistics are averaged with the weights, or stay each
client's.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.core.topology import Topology
from splitfed.engines.base import FED, Placement, Source, Trainer
from splitfed.schedules.base import Round, State, Training, client_roles, shared_roles
from splitfed.schedules.sampling import Averaged, dropped_clients, examples, list_clients


@dataclass(frozen=True, kw_only=True)
class SplitFedV1(Averaged):
    """Federated averaging of a model that is split: everybody trains at the same time."""

    buffers: bool = True

    def placement(self, topology: Topology) -> Placement:
        """Copies of the shared roles, and an aggregation server for the clients' segments."""
        return self.fusing(Placement(shared_roles(topology), client_roles(topology), self.buffers))

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Query, local training, fusion."""
        turns = self.turns(engine, training, number)
        clients = list_clients(turns)
        engine.download(clients, number)
        engine.branch(clients)
        losses = engine.train_at_once({turn.client: turn.epochs for turn in turns})
        if fused := self.enough(turns):
            engine.upload(examples(engine, turns), number)
            engine.merge(examples(engine, turns))
        return Round([loss for found in losses.values() for loss in found], clients, dropped_clients(turns), fused)

    def newest(self, client: int, state: State) -> Source:
        """Everybody uses what the aggregation server averaged."""
        return FED

    def binds(self, clients: int) -> str | None:
        """Averaged segments must be of one make."""
        return "averages client segments" if clients > 1 else None
