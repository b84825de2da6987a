"""Ditto: beside the averaged model every client trains a personal one, with a proximal term towards the averaged one.

Paper: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021, algorithm
1.

The averaged model is trained as in FedAvg. The client's own one gets weight (v - w_round) added to its gradient, where
w_round is what the client was sent at the start of the round. Both train on the same batches, where the paper lets the
client draw others for its own model. With weight = 0 the client's own model is that of a client alone. On a split
replica the client's segments are there twice, and what other parties hold serves both (see `dual_model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from splitfed.core.errors import require_number
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.federated.averaging import Averaging
from splitfed.federated.base import MethodTraits, ObjectivePlacement, State
from splitfed.federated.dual_model import (
    PREFIX,
    add_second_model,
    check_second_model,
    score_second_model,
    second_model,
)
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import Proximal, objective_of


@dataclass(frozen=True, kw_only=True)
class Ditto(Averaging):
    """FedAvg, and a personal model at every client with a proximal term towards the average.

    `weight` >= 0 (the paper's lambda): the factor of the proximal term.
    """

    who = "ditto"

    weight: float = field(default=0.1, metadata=require_number("ditto weight", low=0.0))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; with weight 0 the personal models are trained without any exchange."""
        off = "ditto with weight=0 trains every client's own model alone" if self.weight == 0 else None
        return replace(super().traits(topology), turned_off=off, plain_update=True)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse clients and names that a second model cannot go with."""
        check_second_model(self.who, topology)

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology with a second model and its heads."""
        return add_second_model(topology)

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments of the second model."""
        return second_model(topology)

    def objective(self, placement: ObjectivePlacement) -> Proximal | None:
        """Return the proximal term of a client's personal model; None at a party that serves no client."""
        own = placement.topology.segments_of(placement.role)
        kept = tuple(s.name for s in own if s.name in self.traits(placement.topology).private_segments)
        return None if placement.replica is None else Proximal(self.weight, kept)

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Keep the weights that `arrived` as the anchor of the proximal term."""
        super().begin(learner, arrived, number, state)
        if objective := objective_of(learner, Proximal):
            objective.anchor = {name.removeprefix(f"{PREFIX}_"): tensor for name, tensor in arrived.items()}

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the task's metric of the averaged model on `part`, as "global"."""
        return score_second_model(learner, part, state)
