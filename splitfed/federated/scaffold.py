"""SCAFFOLD: FedAvg whose clients correct every gradient by control variates, against client drift.

Paper: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for federated
learning", ICML 2020, algorithm 1, option II.

A client steps on g + c - c_i. After K steps of rate r from x to y its variate becomes c_i - c + (x - y) / (K r), from
the actual change of its weights. With momentum that change is longer than K r times a gradient: K is then the sum of
the a_i of FedNova, the step weights of this round's gradients, and the change due to the momentum of earlier rounds is
subtracted first; in a run that restarts optimizers there is none. For optimizers other than SGD use
`variates="gradient"`: the mean of the round's raw gradients, which is the same number for plain SGD. The server moves
its weights by `server_rate` times the mean change, and c by the mean change of the variates times the share of all
clients that took part. Both means weight clients by examples as in FedAvg; the paper's have equal weights
(`weighted=False`). Batch-norm statistics are averaged without correction. Variates start at zero; weights and variates
are sent down and up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from splitfed.core.errors import require_name, require_number
from splitfed.core.optimizers import Optim
from splitfed.core.private_values import FEATURES
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging, shared_at, take_step
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner, LearnerIdentity
from splitfed.federated.objectives import NoObjective, objective_of, trainable_names, weights_with_gradients
from splitfed.federated.sgd_reach import check_sgd, sum_step_weights
from splitfed.federated.uploads import Upload, close_round, refuse_settings

VARIATES = ("change", "gradient")


@dataclass(frozen=True, kw_only=True)
class Scaffold(Averaging):
    """FedAvg whose clients correct their gradients by control variates.

    `server_rate` > 0 (the paper's eta_g); `variates`: from the "change" of the weights (option II), or as the mean
    "gradient".
    """

    who: ClassVar[str] = "scaffold"
    refuses: ClassVar[Mapping[str, str]] = {
        "rule": "its server's variate must stay the mean of the clients' variates, which holds under the mean only",
    }

    server_rate: float = field(default=1.0, metadata=require_number("scaffold server_rate", low=0.0, open_low=True))
    variates: str = field(default="change", metadata=require_name("scaffold variates", VARIATES))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for a server rate that is not positive, and for unknown `variates`."""
        super().__post_init__()
        if self.server_rate != 1.0:
            reason = f"server_rate={self.server_rate:g} is a server step as well: set one of the two"
            refuse_settings(self.who, self.settings, {"server_step": reason})

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; variates are computed from the same steps as the weights."""
        base = super().traits(topology)
        return replace(base, message_values={**base.message_values, "variate": FEATURES})

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for optimizers other than SGD, unless `variates` is "gradient"."""
        super().check_run(context)
        for optim in context.optimizers.values() if self.variates == "change" else ():
            check_sgd("scaffold with variates='change'", optim, "; take variates='gradient'")

    def objective(self, placement: ObjectivePlacement) -> Steer | None:
        """Return the control variates that correct a client's gradients."""
        return None if placement.replica is None else Steer(shared_at(self, placement), self.variates == "gradient")

    def start(self, clients: int) -> State:
        """Return the state before the first round, in which the server's variate is zero."""
        return {"weights": {}, "variate": {}, "clients": clients}

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Send the server's variate in addition to the weights."""
        super().begin(learner, arrived, number, state)
        state["variate"] = state["variate"] or {
            n: torch.zeros_like(arrived[n]) for n in self._trainable_names(learner).values()
        }
        common = learner.receive("variate", state["variate"], number)
        if objective := objective_of(learner, Steer):
            objective.begin_round(arrived, common, {} if self.variates == "gradient" else learner.momentum())

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Move the weights by the mean change, and the server's variate by the mean change of the clients' variates."""
        uploads = ((one, part, self._upload(one)) for one, part in self.parts(learners, shares))
        found = close_round(self.settings, uploads, number, state, self.weighted)
        share = len(learners) / state["clients"]
        state["variate"] = {n: state["variate"][n] + share * moved for n, moved in found["variate"].items()}
        state["weights"] = take_step(self, learners[0], found["weights"], state, self.server_rate)

    def _upload(self, learner: Learner) -> Upload:
        """Return the client's weights, and the change of its variate; only the shapes in a plan."""
        own, objective = self.shared_tensors(learner), objective_of(learner, Steer)
        if objective is None:
            return {"weights": own, "variate": {name: own[name] for name in self._trainable_names(learner).values()}}
        return {"weights": own, "variate": objective.end_round(own, learner.optim, learner.rate)}

    def _trainable_names(self, learner: LearnerIdentity) -> dict[str, str]:
        return trainable_names(learner.topology, shared_at(self, learner))


@dataclass
class Steer(NoObjective):
    """Keeps a client's variate `own`, and adds c - `own` to every gradient, with the server's variate c."""

    kept: ClassVar[tuple[str, ...]] = ("own",)

    segments: tuple[str, ...]
    raw: bool
    own: dict[str, Tensor] = field(default_factory=dict)
    common: Mapping[str, Tensor] = field(default_factory=dict)
    first: Mapping[str, Tensor] = field(default_factory=dict)
    drift: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    momentum: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def begin_round(
        self, first: Mapping[str, Tensor], common: Mapping[str, Tensor], momentum: Mapping[str, Tensor]
    ) -> None:
        """Start a round at the weights `first` with the server's variate `common` and the optimizer's `momentum`."""
        self.momentum = {name: tensor.clone() for name, tensor in momentum.items() if name in common}
        self.own = self.own or {name: torch.zeros_like(tensor) for name, tensor in common.items()}
        self.first, self.common, self.steps = first, common, 0
        self.drift = {name: tensor - self.own[name] for name, tensor in common.items()}
        self.sums = {name: torch.zeros_like(tensor) for name, tensor in common.items()} if self.raw else {}

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Add c - c_i to every gradient."""
        self.steps += 1
        for name, _, gradient in weights_with_gradients(modules, self.segments):
            if self.raw:
                self.sums[name] += gradient
            gradient.add_(self.drift[name])

    def end_round(self, last: Mapping[str, Tensor], optim: Optim, rate: float) -> dict[str, Tensor]:
        """End a round of steps of this `rate` at the weights `last`; return the change of the client's variate."""
        if self.steps == 0 or (rate == 0 and not self.raw):
            return {name: torch.zeros_like(tensor) for name, tensor in self.own.items()}
        before = self.own
        if self.raw:
            self.own = {name: total / self.steps for name, total in self.sums.items()}
        else:
            self.own = {name: self._mean(name, last[name], optim, rate) - self.drift[name] for name in before}
        self.first, self.common, self.drift, self.sums, self.momentum = {}, {}, {}, {}, {}
        return {name: tensor - before[name] for name, tensor in self.own.items()}

    def _mean(self, name: str, last: Tensor, optim: Optim, rate: float) -> Tensor:
        """Return the mean, weighted by the a_i, of the gradients by which one weight was stepped in this round."""
        if name not in self.momentum:
            return (self.first[name] - last) / (sum_step_weights(optim, self.steps)[0] * rate)
        length = sum_step_weights(optim, self.steps, 0.0)[0]
        # The part of the change that a unit of momentum causes.
        carried = sum_step_weights(optim, self.steps, 1.0)[0] - length
        return ((self.first[name] - last) / rate - carried * self.momentum[name]) / length
