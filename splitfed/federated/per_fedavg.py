"""Per-FedAvg: clients train weights from which one step on their own rows leads to a good model of their own.

Paper: Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach", NeurIPS 2020, algorithm 1, first-order (FO): the Hessian term is left out.

Batches are taken in pairs. On the first the client takes a plain gradient step at `rate` (by default the current
learning rate of its optimizer); the gradient on the second batch at the moved weights is given to the optimizer, which
steps from the weights before the move. A last batch without a partner is paired with the one before it, or with itself
if there is none. The weights are averaged as in FedAvg. The run predicts, for every client, with the newest average
after one such plain step on the gradient of all the client's training rows; score "global" is the metric of the average
itself. Only on whole models: on split replicas all rows would cross the cut once more at every prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, require_number
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging, score_average, shared_at
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective, objective_of, trainable_names, weights_with_gradients
from splitfed.federated.sgd_reach import check_rates
from splitfed.federated.topology_values import clients_hold_all, only_client

ROWS = 256


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Averaging):
    """FedAvg on the loss after one adaptation step; `rate` >= 0 (the paper's alpha) of that step.

    None takes the clients' learning rate. The outer step is the optimizer's.
    """

    who = "per_fedavg"

    rate: float | None = field(default=None, metadata=require_number("per_fedavg rate", low=0.0))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; a batch may serve in two steps, and with rate 0 nothing is personalised."""
        off = "per_fedavg with rate=0 is fedavg on every second batch" if self.rate == 0 else None
        return replace(super().traits(topology), turned_off=off, post_processing=False)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a split model, whose rows would cross again at every prediction."""
        only_client(self.who, topology)
        if not clients_hold_all(topology):
            raise InvalidInput(
                "per_fedavg answers after a step on all of a client's rows, which at every prediction would cross "
                f"between the parties of topology {topology.name!r} once more, counted by no plan and no ledger: take "
                "splitfed.topologies.local, or ditto, apfl or pfedme, whose personal segments train in the rounds"
            )
        super().check(topology, clients)

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for optimizers without a learning rate, if the inner step is to take theirs."""
        super().check_run(context)
        check_rates(context, self.rate)

    def objective(self, placement: ObjectivePlacement) -> Ahead | None:
        """Return the inner step of a client's weights and its reversal; None at a party that serves no client."""
        return None if placement.replica is None else Ahead(shared_at(self, placement))

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Train on the batches in pairs; return the loss of each step."""
        taken = list(batches)
        if len(taken) % 2:
            taken.insert(-1, taken[max(len(taken) - 2, 0)])
        if objective := objective_of(learner, Ahead):
            objective.away, objective.rate = {}, self._rate(learner)
        # Step numbers stay distinct, also where a schedule trains batch by batch.
        return learner.train(epoch, taken, 2 * first)

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Return the newest average after one plain step on all the client's training rows; None if there is none."""
        if not state["weights"]:
            return None
        adapted: dict[str, Tensor] = dict(state["weights"])
        rows = learner.rows()
        with learner.lend(adapted):
            slope = learner.gradient(torch.arange(rows).chunk(-(-rows // ROWS)))
        for name, one in trainable_names(learner.topology, shared_at(self, learner)).items():
            if one in slope:
                adapted[name] = adapted[name] - self._rate(learner) * slope[one]
        return adapted

    def _rate(self, learner: Learner) -> float:
        return learner.rate if self.rate is None else self.rate

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the metric of the average itself, as "global"."""
        return score_average(learner, learner.topology.heads[0].value, part, state)


@dataclass
class Ahead(NoObjective):
    """Moves the weights of `segments` by a plain step at the first batch of a pair, and restores them at the second."""

    segments: tuple[str, ...]
    rate: float = 0.0
    away: dict[str, Tensor] = field(default_factory=dict)

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Move the weights and remove the gradients, or restore the weights and keep the gradients of the moved."""
        if self.away:
            for segment in self.segments:
                for name, weight in modules[segment].named_parameters():
                    if f"{segment}/{name}" in self.away:
                        weight.data.copy_(self.away[f"{segment}/{name}"])
            self.away = {}
            return
        for name, weight, gradient in weights_with_gradients(modules, self.segments):
            self.away[name] = weight.detach().clone()
            weight.data.sub_(gradient, alpha=self.rate)
            weight.grad = None
