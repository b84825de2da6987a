"""APFL: every client predicts with a mixture of its own weights and the averaged ones, in a share that it learns.

Paper: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020, algorithm 1.

The averaged model w is trained as in FedAvg. The client's own weights v learn through the mixture alpha v + (1 - alpha)
w: their gradient is alpha times that of the mixture, and nothing of it reaches w. alpha steps down its own slope, <v -
w, gradient of the mixture>, at the clients' learning rate, and stays in [0, 1]: once a round at its first batch, as the
authors' code does (which adds .02 alpha to the slope; not here), or at every batch. v and w take their steps at the
same time, on the same batch. Without learning, alpha = 1 is a client alone, and alpha = 0 is FedAvg. The run predicts
with the mixture of the client's v and the newest average. v starts at the broadcast w, whatever the run's `starts`
says: weights are mixed number by number, and those of two networks that were drawn apart do not go together. On a split
replica what the client holds is mixed, and what other parties hold serves both (see `dual_model`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitfed.core.errors import require_name, require_number
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.federated.averaging import Averaging
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.dual_model import (
    PREFIX,
    add_second_model,
    check_second_model,
    score_second_model,
    second_model,
)
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective, objective_of
from splitfed.federated.sgd_reach import check_rates

LEARNS = ("round", "step", "never")


@dataclass(frozen=True, kw_only=True)
class Apfl(Averaging):
    """Adaptive personalized federated learning: every client uses a mixture of the average and weights of its own.

    `alpha`, in [0, 1]: the initial share of a client's own weights; `learns`: when alpha takes a step, once a "round",
    every "step", or "never". `rate` >= 0: the learning rate of alpha (None: the clients' learning rate).
    """

    who: ClassVar[str] = "apfl"

    alpha: float = field(default=0.5, metadata=require_number("apfl alpha", low=0.0, high=1.0))
    learns: str = field(default="round", metadata=require_name("apfl learns", LEARNS))
    rate: float | None = field(default=None, metadata=require_number("apfl rate", low=0.0))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging: both models start from the broadcast weights, and w learns from its own loss.

        It is no post-processing of defended gradients: a mixture has no per-row layer gradients that a defense reads.
        """
        off = "apfl with alpha=1 that never learns trains every client's own model alone"
        return replace(
            super().traits(topology),
            turned_off=off if self.learns == "never" and self.alpha == 1 else None,
            plain_update=True,
            post_processing=False,
            broadcast_segments=tuple(s.name for s in topology.segments if s.role in topology.data_roles),
        )

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for optimizers without a learning rate, if alpha is to take theirs."""
        super().check_run(context)
        check_rates(context, self.rate)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse clients and names that a second model cannot go with."""
        check_second_model(self.who, topology)

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology with a second model w, and with mixtures in place of the modules of the first one."""
        both = add_second_model(topology)
        # The parties of a group have one each: nobody reads another's.
        alphas = {
            role: nn.Parameter(torch.tensor(float(self.alpha)), requires_grad=self.learns != "never")
            for role in topology.data_roles
        }
        mixed = tuple(
            replace(s, module=Mixture(s.module, both.segment(f"{PREFIX}_{s.name}").module, alphas[s.role]))
            if s.role in topology.data_roles and not s.name.startswith(f"{PREFIX}_")
            else s
            for s in both.segments
        )
        return replace(both, segments=mixed)

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments of the second model."""
        return second_model(topology)

    def objective(self, placement: ObjectivePlacement) -> Learn | None:
        """Return the gradient step on a client's mixing weight alpha; None at a party that serves no client."""
        own = placement.topology.segments_of(placement.role)
        kept = tuple(s.name for s in own if s.name in self.traits(placement.topology).private_segments)
        return None if placement.replica is None or not kept else Learn(self.learns, kept)

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Start the round from the weights that `arrived`, and let alpha take a step at the next batch."""
        super().begin(learner, arrived, number, state)
        if objective := objective_of(learner, Learn):
            objective.due, objective.rate = True, learner.rate if self.rate is None else self.rate

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the task's metric of the averaged model on `part`, as "global"."""
        return score_second_model(learner, part, state)


class Mixture(nn.Module):
    """Module `own` evaluated with weights alpha * own + (1 - alpha) * other, where `other` gets no gradient."""

    def __init__(self, own: nn.Module, other: nn.Module, alpha: nn.Parameter) -> None:
        super().__init__()
        self.own, self.alpha = own, alpha
        # In a tuple, so that it is not registered as a submodule: it is a segment of its own.
        self._other = (other,)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output of `own` with the mixed weights."""
        pairs = zip(self.own.named_parameters(), self._other[0].parameters(), strict=True)
        mixed = {name: self.alpha * v + (1 - self.alpha) * w.detach() for (name, v), w in pairs}
        return functional_call(self.own, mixed, inputs)

    def merged(self) -> nn.Module:
        """Return a copy of `own` that holds the mixed weights."""
        found = copy.deepcopy(self.own)
        with torch.no_grad():
            for v, w in zip(found.parameters(), self._other[0].parameters(), strict=True):
                v.copy_(self.alpha * v + (1 - self.alpha) * w)
        return found


@dataclass
class Learn(NoObjective):
    """Gradient step on alpha, in place of the party's optimizer, for which the gradient of alpha is removed."""

    learns: str
    segments: tuple[str, ...]
    due: bool = True
    rate: float = 0.0

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Step alpha along its gradient if a step is due, clamp it to [0, 1], and remove its gradient."""
        # A defense may have layers of its own behind the segment.
        alpha = next(one.alpha for one in modules[self.segments[0]].modules() if isinstance(one, Mixture))
        if alpha.grad is not None and self.due:
            alpha.data.sub_(alpha.grad, alpha=self.rate).clamp_(0.0, 1.0)
            self.due = self.learns == "step"
        alpha.grad = None
