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
from splitfed.engines.base import Placement, Trainer
from splitfed.schedules.base import Round, State, Training, client_roles, shared_roles
from splitfed.schedules.sampling_and_dropout import Averaged, train_in_parallel


@dataclass(frozen=True, kw_only=True)
class SplitFedV1(Averaged):
    """Federated averaging of a model that is split: everybody trains at the same time."""

    buffers: bool = True
    averages_clients = True

    def placement(self, topology: Topology) -> Placement:
        """Copies of the shared roles, and an aggregation server for the clients' segments."""
        return self.fusing(Placement(shared_roles(topology), client_roles(topology), self.buffers))

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Query, local training, fusion."""
        return train_in_parallel(self, engine, training, number, by_examples=True)
