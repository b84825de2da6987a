"""FedProx: FedAvg with a proximal term that keeps clients near the weights that they were sent.

Paper: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks", MLSys 2020,
algorithm 2.

A client's loss is the task's loss plus mu / 2 times the squared distance of its weights to those at the start of the
round, so mu (w - w_round) is added to its gradient. With mu = 0 it is FedAvg to the bit. The paper samples clients by
their share of the examples and averages with equal weights; here they are sampled uniformly and averaged by examples,
as in FedAvg (`weighted=False`: equal weights). In the paper a client that stops early sends its partial result; here a
client that drops out sends nothing.
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
    """FedAvg with a proximal term towards the weights that a client was sent.

    `mu` >= 0: the factor of the proximal term.
    """

    who = "fedprox"

    mu: float = field(default=0.01, metadata=require_number("fedprox mu", low=0.0))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; the proximal term is zero at the received weights, where training starts."""
        off = "fedprox with mu=0 is fedavg" if self.mu == 0 else None
        return replace(super().traits(topology), turned_off=off, plain_update=True, accumulates=True)

    def objective(self, placement: ObjectivePlacement) -> Proximal | None:
        """Return the proximal term towards the weights that a client was sent."""
        return None if placement.replica is None else Proximal(self.mu, shared_at(self, placement))

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Keep the weights that `arrived` as the anchor of the proximal term."""
        super().begin(learner, arrived, number, state)
        if objective := objective_of(learner, Proximal):
            objective.anchor = arrived
