"""FedNova: FedAvg that normalises each client's change by its local steps, before the changes are averaged.

Paper: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in heterogeneous federated
optimization", NeurIPS 2020, equation 6.

A client's change x - y_i is divided by a_i, the sum of the weights with which its gradients enter that change: the
number of steps for plain SGD, more with momentum. The paper and its authors' code start every round with empty momentum
(`restart=True`, or the run's `restart_optimizers`). If momentum is kept, the part that stems from gradients of earlier
rounds counts in a_i as well, so that a constant gradient is recovered exactly in either case. The server steps by
tau_eff = sum p_i a_i times the weighted mean of the normalised changes, so that a client with more steps (more rows,
more batches) has no more influence. If all take the same number of steps, it is FedAvg. A client sends its weights and
a_i. Batch-norm statistics are averaged without normalisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from splitfed.aggregation.running_mean import RunningMean
from splitfed.core.optimizers import Optim
from splitfed.core.private_values import PrivateValues
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging, shared_at, take_step
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective, objective_of, trainable_names
from splitfed.federated.sgd_reach import check_sgd, sum_step_weights


@dataclass(frozen=True, kw_only=True)
class FedNova(Averaging):
    """Averaging of the clients' changes, each divided by the sum a_i of its step weights."""

    who: ClassVar[str] = "fednova"
    refuses: ClassVar[Mapping[str, str]] = {
        "rule": "its server step tau_eff is defined for the mean of the normalised changes only",
        "secure": "its server divides each client's change by its own a_i, and a secure sum hides the single changes",
    }

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; a client also sends a_i, by which the aggregation server divides."""
        base = super().traits(topology)
        told = {**base.message_values, "steps": PrivateValues.NONE}
        return replace(base, plain_update=True, message_values=told)

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for optimizers other than SGD, for which no formula of a_i is known."""
        super().check_run(context)
        for optim in context.optimizers.values():
            check_sgd("fednova", optim)

    def objective(self, placement: ObjectivePlacement) -> Count | None:
        """Return a counter of a client's steps; None at a party that serves no client."""
        return None if placement.replica is None else Count()

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Reset the step counter, and note how much the client's momentum holds of earlier gradients."""
        super().begin(learner, arrived, number, state)
        if objective := objective_of(learner, Count):
            objective.begin(learner.optim, bool(learner.momentum()))

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Collect weights and a_i of all clients; move the average by tau_eff times the mean normalised change."""
        plain, changes, reached = RunningMean(), RunningMean(), 0.0
        before: dict[str, Tensor] = state["weights"]
        names = trainable_names(learners[0].topology, shared_at(self, learners[0]))
        for learner, part in self.parts(learners, shares):
            objective = objective_of(learner, Count)
            steps = sum_step_weights(learner.optim, objective.steps, objective.held)[0] if objective else 1.0
            arrived = learner.send("weights", self.shared_tensors(learner), number)
            a = float(learner.send("steps", {"a": torch.tensor(steps, dtype=torch.float64)}, number)["a"])
            plain.add({n: t for n, t in arrived.items() if n not in names}, part)
            # A client without a step, possible with batches of random size, has no change to normalise.
            changes.add({n: before[n].double() - arrived[n].double() for n in names}, part / a if a else 0.0)
            reached += part * a
        stepped = {n: (before[n] - reached * change).to(before[n].dtype) for n, change in changes.value().items()}
        after = {**plain.value(), **stepped}
        state["weights"] = take_step(self, learners[0], {name: after[name] for name in before}, state)


@dataclass
class Count(NoObjective):
    """Counts the steps of a round; `held`: how much of a constant gradient the momentum held before, None if empty."""

    kept: ClassVar[tuple[str, ...]] = ("steps", "held")

    steps: int = 0
    held: float | None = None

    def begin(self, optim: Optim, remembers: bool) -> None:
        """Start a round; `remembers`: whether momentum exists, be it from a round that the client did not finish."""
        self.held = sum_step_weights(optim, self.steps, self.held)[1] if remembers else None
        self.steps = 0

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Count one step."""
        self.steps += 1
