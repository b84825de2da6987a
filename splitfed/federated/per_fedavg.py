"""Per-FedAvg: clients train weights from which one step on their own rows leads to a good model of their own.

Paper: Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach", NeurIPS 2020, algorithm 1, first-order (FO): the Hessian term is left out.

Batches are taken in pairs. On the first the client steps by `rate` times the gradient, plainly (by default at the rate
of its optimizer, as that stands); the gradient at that place on the second is what the optimizer steps on, from where
the weights were before. A last batch without a partner takes the one before it as its first, or itself where there is
no other. The weights are averaged as in FedAvg. The run predicts, for every client, with the newest average after one
such step on the gradient of all the client's training rows, as the client would take it; score "global" is the metric
of the average itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from splitfed.core.errors import require_number
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging, score_average, shared_at
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective, objective_of, trainable_names, weights_with_gradients
from splitfed.federated.sgd_reach import check_rates

ROWS = 256


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Averaging):
    """`rate` >= 0 (the paper's alpha) of the step to a client's own model; the outer one is the optimizer's.

    None takes the clients' learning rate for both.
    """

    who = "per_fedavg"
    whole = True

    rate: float | None = field(default=None, metadata=require_number("per_fedavg rate", low=0.0))

    def traits(self, topology: Topology) -> MethodTraits:
        """It may take two steps on the same batch; without the step to a client's own model nothing is personal."""
        off = "per_fedavg with rate=0 is fedavg on every second batch" if self.rate == 0 else None
        return replace(super().traits(topology), turned_off=off, post_processing=False)

    def check_run(self, context: MethodContext) -> None:
        """Refuse clients without a learning rate, where the inner step takes theirs."""
        super().check_run(context)
        check_rates(context, self.rate)

    def objective(self, placement: ObjectivePlacement) -> Ahead | None:
        """Return the inner step of a client's weights and its reversal; None at a party that serves no client."""
        return None if placement.replica is None else Ahead(shared_at(self, placement))

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Take the batches in pairs."""
        taken = list(batches)
        if len(taken) % 2:
            taken.insert(-1, taken[max(len(taken) - 2, 0)])
        if objective := objective_of(learner, Ahead):
            objective.away, objective.rate = {}, self._rate(learner)
        # Numbered apart, also where a schedule asks for single batches.
        return learner.train(epoch, taken, 2 * first)

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Return the newest average after the client's own step."""
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
        """Return the metric of the average itself."""
        return score_average(learner, learner.topology.heads[0].value, part, state)


@dataclass
class Ahead(NoObjective):
    """At the first batch of a pair moves the weights of `segments` by a plain step; at the second takes them back."""

    segments: tuple[str, ...]
    rate: float = 0.0
    away: dict[str, Tensor] = field(default_factory=dict)

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Go there, leaving no gradient to step on; or come back with the gradient met there."""
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
