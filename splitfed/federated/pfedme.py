"""pFedMe: clients train personal models with a proximal term towards weights that follow them and are averaged.

Paper: Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020, algorithm 1.

On every batch the client's own model theta takes `steps` steps of its optimizer on its loss plus weight / 2 times the
squared distance to w, and w then moves: w <- w - rate weight (w - theta). The aggregation server averages the w of the
clients that finished and moves by `beta` times the way there. As in the authors' code theta starts a round at w and
goes on from batch to batch. Their optimizer of theta is plain; give the clients momentum and it has one, which goes on
from round to round unless optimizers are restarted: theta is an approximate minimum, by whatever steps it was found.
The mean weighs by examples; the paper's is even (`weighted=False`). The run predicts with theta; score "global", of
whole models, is the metric of the averaged w. On a split replica theta and w are what the client holds; what other
parties hold takes a step with every step of theta.

A step of SGD at rate r leaves 1 - r weight of the way from w to theta, a step of w 1 - rate weight of that from theta:
at a product of one or more they overshoot, beyond two they diverge. Such rates are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging, score_average, shared_at, take_step
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective, objective_of, trainable_names, weights_with_gradients
from splitfed.federated.sgd_reach import first_rate
from splitfed.federated.uploads import close_round, refuse_settings


@dataclass(frozen=True, kw_only=True)
class PFedMe(Averaging):
    """`weight` > 0 (the paper's lambda), `steps` >= 1 a batch (K), `beta` >= 0 of the server, `rate` > 0 of w.

    `rate`: None takes the clients' learning rate. `weight` * `rate`, and for SGD `weight` times the clients' learning
    rate, must be below one.
    """

    who = "pfedme"

    weight: float = field(default=15.0, metadata=require_number("pfedme weight", low=0.0, open_low=True))
    steps: int = field(default=5, metadata=require_count("pfedme steps", low=1))
    beta: float = field(default=1.0, metadata=require_number("pfedme beta", low=0.0))
    rate: float | None = field(default=None, metadata=require_number("pfedme rate", low=0.0, open_low=True))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range."""
        super().__post_init__()
        if self.beta != 1.0:
            reason = f"beta={self.beta:g} is a server step as well: set one of the two"
            refuse_settings(self.who, self.settings, {"server_step": reason})
        if self.rate is not None:
            self._check_product("rate", self.rate)

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for learning rates at which the steps of theta or w overshoot."""
        super().check_run(context)
        for optim in context.optimizers.values():
            if self.rate is None or optim.name == "SGD":
                self._check_product("the clients' learning rate", first_rate(optim))

    def _check_product(self, what: str, rate: float) -> None:
        if rate * self.weight >= 1:
            raise InvalidInput(
                f"pfedme weight={self.weight:g} times {what} {rate:g} is {rate * self.weight:g}, and the step towards "
                f"the other weights overshoots from 1 on: take a rate below {1 / self.weight:.3g}, or a smaller weight"
            )

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; a batch serves in several steps; beta 0 never changes the shared weights."""
        off = "pfedme with beta=0 never moves what is shared" if self.beta == 0 else None
        return replace(super().traits(topology), turned_off=off, post_processing=False)

    def objective(self, placement: ObjectivePlacement) -> Envelope | None:
        """Return the Moreau envelope of a client's model: the proximal term towards w, and the steps of w."""
        return None if placement.replica is None else Envelope(self.weight, self.steps, shared_at(self, placement))

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Start both theta and w at the weights that `arrived`."""
        super().begin(learner, arrived, number, state)
        if objective := objective_of(learner, Envelope):
            names = set(trainable_names(learner.topology, objective.segments).values())
            objective.slow = {name: arrived[name].clone() for name in names}
            objective.rate, objective.taken = learner.rate if self.rate is None else self.rate, 0

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Take `steps` steps on every batch; return the loss of each step."""
        return learner.train(epoch, [rows for rows in batches for _ in range(self.steps)], first * self.steps)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the clients' w, and move the server's weights by `beta` times the difference to the mean."""
        uploads = ((one, part, {"weights": self._upload(one)}) for one, part in self.parts(learners, shares))
        found = close_round(self.settings, uploads, number, state, self.weighted)
        state["weights"] = take_step(self, learners[0], found["weights"], state, self.beta)

    def _upload(self, learner: Learner) -> dict[str, Tensor]:
        """Return the client's w, with the buffers of its model if these are averaged."""
        contents = self.shared_tensors(learner)
        if objective := objective_of(learner, Envelope):
            objective.follow(contents)
            names = trainable_names(learner.topology, objective.segments)
            contents |= {name: objective.slow[one] for name, one in names.items()}
            objective.slow = {}
        return contents

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Return None: every client uses its own model."""
        return None

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the metric of the averaged weights, as "global"."""
        return score_average(learner, learner.topology.heads[0].value, part, state)


@dataclass
class Envelope(NoObjective):
    """Stores the weights w as `slow`, adds the proximal term towards them, and updates w after each batch."""

    weight: float
    steps: int
    segments: tuple[str, ...]
    rate: float = 0.0
    taken: int = 0
    slow: dict[str, Tensor] = field(default_factory=dict)

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Add `weight` * (theta - w) to every gradient; every `steps` steps, first update w."""
        if self.taken % self.steps == 0:
            self.follow({f"{s}/{name}": theta for s in self.segments for name, theta in modules[s].named_parameters()})
        self.taken += 1
        for name, theta, gradient in weights_with_gradients(modules, self.segments):
            gradient.add_(theta.detach() - self.slow[name], alpha=self.weight)

    def follow(self, own: Mapping[str, Tensor]) -> None:
        """Move w towards theta after the last step on a batch; before the first batch do nothing."""
        for name, slow in self.slow.items() if self.taken else ():
            slow.add_(own[name].detach() - slow, alpha=self.rate * self.weight)
