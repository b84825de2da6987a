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
from splitfed.engines.base import FED, Placement, ReplicaBatches, Scales, Source
from splitfed.schedules.base import State, client_roles
from splitfed.schedules.joint_step import JointStep


@dataclass(frozen=True, kw_only=True)
class Blind(JointStep):
    """All clients' losses as one loss; `by_examples` weights each client by its rows, otherwise all count the same."""

    average: bool = False
    by_examples: bool = True
    buffers: bool = True

    def placement(self, topology: Topology) -> Placement:
        """Return an aggregation server if client segments are averaged, otherwise nothing."""
        return self.fusing(Placement((), client_roles(topology) if self.average else (), self.buffers))

    def shares(self, batches: ReplicaBatches) -> Scales:
        """Return each client's share of all rows, or equal shares unless `by_examples` is set."""
        return super().shares(batches) if self.by_examples else dict.fromkeys(batches, 1 / len(batches))

    def newest(self, client: int, state: State) -> Source:
        """Return the client's own segments, or the averaged ones if `average` is set."""
        return FED if self.average else client

    def binds(self, clients: int) -> str | None:
        """Return the reason if client segments are averaged, otherwise None."""
        return "averages client segments" if self.average and clients > 1 else None
