"""Aggregation: every client trains alone, on its own rows and on the public rows of all others.

Paper: Zhou, Li, Chen, Ding, "Model agnostic federated mutual learning", 2023, whose baseline AGG it is; after Zhao, Li,
Lai, Suda, Civin, Chandra, "Federated learning with non-IID data", 2018, who hand out a shared data set.

A client's public rows are sent once, when it first takes part, to the aggregation server, which sends them to all other
clients. A client takes as many steps, of as many rows, as the schedule sets, but its rows are drawn anew every epoch,
without repetition, from the union of its own and the others' public ones. So one epoch of the schedule does not cover
the union; and where a schedule trains batch by batch, a shorter last batch of an epoch may repeat rows. Nothing else is
exchanged, so models may differ in architecture. Under a schedule that moves weights, the rows are shared in addition.
Clients start from the weights that the run's `starts` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from splitfed.core.random import derive
from splitfed.core.topology import Topology
from splitfed.federated import public_rows
from splitfed.federated.base import Method, MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner

PART = "own and shown"


@dataclass(frozen=True, kw_only=True)
class Aggregation(Method):
    """Clients train on the union of their own rows and the others' public rows."""

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of a method that sends public rows and nothing else."""
        return replace(super().traits(topology), message_values=public_rows.SHOWN_VALUES)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for clients that cannot train on each other's rows."""
        public_rows.check("aggregation", topology, clients, classes=False)

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` if a client has no public rows."""
        public_rows.check_public("aggregation", context.public)

    def objective(self, placement: ObjectivePlacement) -> public_rows.PublicRowsObjective | None:
        """Return the store of others' public rows at a client; None at a party that serves no client."""
        return None if placement.replica is None else public_rows.PublicRowsObjective()

    def start(self, clients: int) -> State:
        """Return the state before any public rows are sent."""
        return public_rows.start()

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Exchange public rows: each client keeps the union of its own rows and all others' public ones."""
        for learner in public_rows.exchange_rows(learners, number, state):
            public_rows.store_rows(learner, PART, public_rows.received_rows(learner, state), "train")

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Take as many training steps, of as many rows of the union, as `batches` has; return the loss of each step."""
        seed, size = derive(learner.seed, "aggregation", learner.replica, epoch), max(map(len, batches), default=0)
        starts = [(first + i) * size for i in range(len(batches))]
        count = learner.rows(PART)
        drawn = [
            public_rows.draw_row_numbers(seed, count, at, len(rows)) for at, rows in zip(starts, batches, strict=True)
        ]
        return learner.train(epoch, drawn, first, part=PART)
