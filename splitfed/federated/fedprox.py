"""FedProx: FedAvg with a proximal term that keeps clients near the weights that they were sent.

Paper: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks", MLSys 2020,
algorithm 2.

A client's loss is its own plus mu / 2 times the squared distance of its weights to those of the start of the round, so
its gradient gets mu (w - w_round). With mu = 0 it is FedAvg to the bit. The paper draws clients by their share of the
examples and averages alike; here they are drawn alike and averaged by examples, as in FedAvg (`weighted=False`: alike).
A client that is cut short in the paper sends what it has; here one that drops out sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from splitfed.core.errors import require_number
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging, shared_at
from splitfed.federated.base import MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import Proximal, objective_of


@dataclass(frozen=True, kw_only=True)
class FedProx(Averaging):
    """FedAvg whose clients are held near the weights that they were sent.

    `mu` >= 0: how strongly a client is held.
    """

    who = "fedprox"

    mu: float = field(default=0.01, metadata=require_number("fedprox mu", low=0.0))

    def traits(self, topology: Topology) -> MethodTraits:
        """The term vanishes at the weights that were sent, where the first step begins."""
        off = "fedprox with mu=0 is fedavg" if self.mu == 0 else None
        return replace(super().traits(topology), turned_off=off, plain_update=True, accumulates=True)

    def objective(self, placement: ObjectivePlacement) -> Proximal | None:
        """Return the proximal term towards the weights that a client was sent."""
        return None if placement.replica is None else Proximal(self.mu, shared_at(self, placement))

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Remember what has arrived."""
        super().begin(learner, arrived, number, state)
        if objective := objective_of(learner, Proximal):
            objective.anchor = arrived
