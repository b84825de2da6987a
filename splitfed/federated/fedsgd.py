"""FedSGD: clients send the gradient of their rows, and the aggregation server takes one step on the average.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, section 2.

In a round no client takes a step: the gradients of its batches, all at the weights it was sent, are averaged by rows.
So the size of a batch says how much is computed at a time, and nothing else; with schedule "independent" and `steps` a
round takes some of the rows only. The server's step is plain, at `rate` (None: the clients' learning rate); the
clients' optimizers do nothing, which is said where they were given a momentum or the like. Batch-norm statistics are
averaged beside. On a split replica this holds for what the client holds; other parties step on every batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, require_number
from splitfed.core.messages import WEIGHT_GRADIENT, Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging, shared_at, take_step
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import (
    NoObjective,
    objective_of,
    trainable_names,
    weight_names,
    weights_with_gradients,
)
from splitfed.federated.uploads import Upload, close_round


@dataclass(frozen=True, kw_only=True)
class FedSgd(Averaging):
    """Clients send gradients of all their rows, and the server takes one step a round.

    `rate` > 0: the server's learning rate; None: the current learning rate of the clients' optimizers.
    """

    who = "fedsgd"

    rate: float | None = field(default=None, metadata=require_number("fedsgd rate", low=0.0, open_low=True))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits: one gradient a round is sent, in which each step is weighted by its number of rows."""
        return replace(
            super().traits(topology),
            returns_weights=False,
            plain_update=True,
            sends_gradients=self.settings.sum is None,
            weighted_by_batch_size=True,
        )

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for optimizer settings that act on a client's own step: clients take none here."""
        super().check_run(context)
        for role, optim in context.optimizers.items():
            own = not isinstance(optim.name, str)
            refused = {
                f"clip_norm={optim.clip_norm}": optim.clip_norm is not None,
                f"optimizer {optim.label}": own,
                "parameter groups": bool(optim.groups),
            }
            if named := next((text for text, given in refused.items() if given), None):
                raise InvalidInput(
                    f"{named} of {role!r} is not allowed with fedsgd: its clients take no step, they send their "
                    "gradients as they are"
                )
            unused = [f"{name}={value!r}" for name, value in optim.options.items() if name != "lr" and value]
            if optim.name != "SGD":
                unused.insert(0, f"optimizer {optim.label}")
            if unused and optim != Optim():
                warnings.warn(
                    f"fedsgd's clients take no step, and its server a plain one: {', '.join(unused)} of {role!r} has "
                    "no effect",
                    stacklevel=2,
                )

    def objective(self, placement: ObjectivePlacement) -> Collect | None:
        """Return the accumulator of a client's gradients, which leaves its optimizer none."""
        return None if placement.replica is None else Collect(shared_at(self, placement))

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Start a round from the weights that `arrived`, and clear the gradients of the round before."""
        super().begin(learner, arrived, number, state)
        if objective := objective_of(learner, Collect):
            objective.sums, objective.rows = {}, 0

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Take one server step on the averaged gradient."""
        uploads = ((one, part, self._upload(one)) for one, part in self.parts(learners, shares))
        found = close_round(self.settings, uploads, number, state, self.weighted)
        first = learners[0]
        rate = first.rate if self.rate is None else self.rate
        names = trainable_names(first.topology, shared_at(self, first))
        stepped = {n: state["weights"][n] - rate * found[WEIGHT_GRADIENT][one] for n, one in names.items()}
        state["weights"] = take_step(self, first, {**state["weights"], **found.get("weights", {}), **stepped}, state)

    def _upload(self, learner: Learner) -> Upload:
        """Return the client's gradient, and its buffers if these are averaged."""
        shared, contents = shared_at(self, learner), self.shared_tensors(learner)
        objective, names = objective_of(learner, Collect), trainable_names(learner.topology, shared)
        gradients = {n: contents[n] if objective is None else objective.mean(n, contents[n]) for n in names.values()}
        weights = weight_names(learner.topology, shared)
        others = {n: t for n, t in contents.items() if n not in weights}
        return {WEIGHT_GRADIENT: gradients, **({"weights": others} if others else {})}


@dataclass
class Collect(NoObjective):
    """Accumulates the gradients of `segments`, each times the rows of its batch; the optimizer gets none."""

    segments: tuple[str, ...]
    sums: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0
    batch: int = 0

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Record the number of rows of the step; add no loss term."""
        self.batch = len(next(iter(made.values())))
        return {}

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Accumulate the gradients of the step and remove them."""
        self.rows += self.batch
        for name, weight, gradient in weights_with_gradients(modules, self.segments):
            if name in self.sums:
                self.sums[name].add_(gradient, alpha=self.batch)
            else:
                self.sums[name] = gradient * self.batch
            weight.grad = None

    def mean(self, name: str, like: Tensor) -> Tensor:
        """Return the gradient of the mean loss over the round's rows, of the shape of `like`; zero without steps."""
        return self.sums[name] / self.rows if name in self.sums else torch.zeros_like(like)
