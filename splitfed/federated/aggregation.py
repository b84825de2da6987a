"""Aggregation: every client trains alone, on its own rows and on the public rows of all others.

Paper: Zhou, Li, Chen, Ding, "Model agnostic federated mutual learning", 2023, whose baseline AGG it is; after Zhao, Li,
Lai, Suda, Civin, Chandra, "Federated learning with non-IID data", 2018, who hand out a shared data set.

Public rows are sent once, when a client first takes part, to the aggregation server and by it to everybody. A client
takes as many steps, of as many rows, as the schedule asks for, but its rows are drawn anew every epoch, without
repetition, from the union of its own and the others' public ones. So an epoch of the schedule is not all of the union;
and where a schedule asks for batches one by one, the last of an epoch, if it is a shorter one, may repeat rows. Nothing
else is exchanged; models may be of any make. Under a schedule that moves weights this is sharing of data on top of it.
Clients start from the weights that the run's `starts` says.
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
    """Own rows and others' public rows are one training set."""

    def traits(self, topology: Topology) -> MethodTraits:
        """Rows are shown, and nothing else is sent."""
        return replace(super().traits(topology), message_values=public_rows.SHOWN_VALUES)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse clients that could not use each other's rows."""
        public_rows.check("aggregation", topology, clients, classes=False)

    def check_run(self, context: MethodContext) -> None:
        """Refuse a client that shows nothing."""
        public_rows.check_public("aggregation", context.public)

    def objective(self, placement: ObjectivePlacement) -> public_rows.PublicRowsObjective | None:
        """Return the store of others' public rows at a client; None at a party that serves no client."""
        return None if placement.replica is None else public_rows.PublicRowsObjective()

    def start(self, clients: int) -> State:
        """Nobody has shown anything."""
        return public_rows.start()

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Exchange public rows: each client keeps the union of its own rows and all others' public ones."""
        for learner in public_rows.exchange_rows(learners, number, state):
            public_rows.store_rows(learner, PART, public_rows.received_rows(learner, state), "train")

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Train on as many rows of the union as there are in `batches`."""
        seed, size = derive(learner.seed, "aggregation", learner.replica, epoch), max(map(len, batches), default=0)
        starts = [(first + i) * size for i in range(len(batches))]
        count = learner.rows(PART)
        drawn = [
            public_rows.draw_row_numbers(seed, count, at, len(rows)) for at, rows in zip(starts, batches, strict=True)
        ]
        return learner.train(epoch, drawn, first, part=PART)
