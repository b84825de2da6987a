"""SplitFed v1: clients in parallel, a copy of the server's segment for each; both sides are averaged every round.

Paper: Thapa, Chamikara, Camtepe, Sun, "SplitFed: when federated learning meets split learning", AAAI 2022, algorithms 1
and 2.

The aggregation server, a party of its own, averages the clients' segments (one message down at the start of a round,
one up at its end); the main server averages its copies. Both averages are weighted by examples. Optimizer state is kept
with its segment from round to round. `buffers`: True averages batch-norm statistics with the weights; False leaves them
with each client.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.core.topology import Topology
from splitfed.engines.base import Placement, Trainer
from splitfed.schedules.base import Round, State, Training, client_roles, shared_roles
from splitfed.schedules.sampling_and_dropout import Averaged, train_in_parallel


@dataclass(frozen=True, kw_only=True)
class SplitFedV1(Averaged):
    """Federated averaging of a split model, whose clients train at the same time."""

    buffers: bool = True
    averages_clients = True

    def placement(self, topology: Topology) -> Placement:
        """Return a copy of the shared roles for each client, and an aggregation server for the clients' segments."""
        return self.fusing(Placement(shared_roles(topology), client_roles(topology), self.buffers))

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Train one round: send averaged segments down, train in parallel, send them up and average."""
        return train_in_parallel(self, engine, training, number, by_examples=True)
