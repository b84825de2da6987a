"""The contract of a federated method: query, local loss, upload, fusion, layered on any schedule and topology.

A method is a frozen value. What a client adds to its own training is a `LocalObjective` at one of its parties; what a
round brings, before and after the schedule has trained, happens between the clients' `Learner`s and the fed server. A
whole local model is a topology of one party; a split lane is any other: a method sees the same `Learner` in both cases.

All that a method sends goes through `Learner.send` and `Learner.receive`: it is counted, recorded and can be attacked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from splitfed.core.local_objective import LocalObjective
from splitfed.core.optimizers import Optim
from splitfed.core.probe import Facts
from splitfed.core.topology import Topology
from splitfed.old_names import adopt

State = dict[str, Any]


@dataclass(frozen=True)
class ObjectivePlacement:
    """Where a local objective would stand: the party in `role` of `lane` (None: one party for all lanes).

    `topology` and `facts` are the lane's, with whatever the method's `fit` has put in. `seed`: of what it draws.
    """

    party: str
    role: str
    lane: int | None
    topology: Topology
    facts: Facts
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Learner(Protocol):
    """One client of a run as a method sees it."""

    @property
    def lane(self) -> int:
        """Which client it is."""
        ...

    @property
    def topology(self) -> Topology:
        """The client's topology."""
        ...

    @property
    def objectives(self) -> Mapping[str, LocalObjective]:
        """The local objectives at the client's own parties, by role; none where nothing is computed, as in a plan."""
        ...

    def objective(self, role: str) -> LocalObjective | None:
        """Return the local objective at the client's party of `role`, its own or one of all; None in a plan."""
        ...

    @property
    def seed(self) -> int:
        """The run's seed, to be derived from: by purpose, and by `lane` for what is one client's."""
        ...

    def rows(self, part: str = "train") -> int:
        """Return how many rows the client has in `part`; "public" is the part of "train" that it shows to others."""
        ...

    @property
    def shown(self) -> Tensor:
        """Which rows of "train" are the public ones: (rows,) int64, on the CPU."""
        ...

    def inputs(self, part: str = "train") -> dict[str, Tensor]:
        """Return the client's raw inputs in `part`: name -> (rows, ...)."""
        ...

    @property
    def rate(self) -> float:
        """The learning rate that the client's optimizers stand at (the first party's, where it has several)."""
        ...

    @property
    def optim(self) -> Optim:
        """The optimizer as it was asked for (the first party's, where the client has several)."""
        ...

    def momentum(self) -> dict[str, Tensor]:
        """Return the momentum that the client's optimizers hold, as `segment/name` -> tensor of the weight's shape.

        Their own tensors, which the next step changes. Empty for optimizers without one, before their first step, and
        after a restart.
        """
        ...

    def hold(
        self, part: str, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], own: Tensor | None = None
    ) -> None:
        """Keep further rows under the name `part`, such as those that others have shown: input or head -> (rows, ...).

        `own`: (rows,) which row of "train" each is, -1 for others', so that what a private mechanism is used for is
        counted for the right row (default: all others'). Labels are trained on as they are given. The rows are no state
        of the run: who holds such rows gives them again after a resume.
        """
        ...

    def train(
        self, epoch: int, batches: Sequence[Tensor], first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Take a training step a batch (row numbers of `part`) over the client's topology; return the losses.

        `task` multiplies the task's own losses: at 0 no label crosses, and only local objectives are learnt.
        """
        ...

    def separate_optimizer(self, name: str) -> AbstractContextManager[None]:
        """Let steps inside the block go on from an optimizer state of their own, at every party of the client's lane.

        Its `name` tells it from others: it is empty at first, outlasts the block, and is forgotten where optimizers are
        restarted. All other steps find their state, such as momentum, as they left it; the learning rate is the same.
        """
        ...

    def consult(self, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        """Return the model's output `value` for some `rows` of `part`, (rows, ...), at the party that makes it.

        In evaluation mode, with the segments as they train, and the defenses; what crosses is counted as training's.
        Once a round `number` and part, so that defenses draw afresh.
        """
        ...

    def compute(self, value: str, part: str = "train") -> Tensor:
        """Return `value` of all rows of `part`, (rows, ...), in evaluation mode, at the party that makes it.

        Only for what the client's own segments make of its own inputs: nothing crosses. Raises `InvalidInput` for
        any other value.
        """
        ...

    def labels(self, head: str, part: str = "train") -> Tensor:
        """Return the client's labels of `head` in `part`, as it trains on them: (rows,)."""
        ...

    def contents(self, segments: Sequence[str], copies: bool = True) -> dict[str, Tensor]:
        """Return copies of the weights and buffers of the client's `segments`, as `segment/name` -> tensor.

        Without `copies` they are the client's own, to be sent at once (which copies them) and not to be kept.
        """
        ...

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Put `tensors`, named as `contents` names them, in place of the client's; optimizer state stays."""
        ...

    def lend(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let the client's segments hold `tensors` inside the block; what they hold themselves is not touched.

        Segments and buffers that are not among them stay the client's own. For `compute` and `gradient`, not to train.
        """
        ...

    def gradient(self, batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over the rows of `batches` of "train", as `segment/name` -> tensor.

        Of a whole model, in training mode; no weight moves and no buffer changes.
        """
        ...

    def send(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Send `tensors` to the fed server in round `number` as a message of `kind`; return what has arrived.

        `role`: who sends, of the parties that serve the client (default: the client itself).
        """
        ...

    def receive(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Have `tensors` sent from the fed server to the client as a message of `kind`; return what has arrived.

        `role`: who receives, as in `send`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods: everything is optional, the defaults add nothing.

    `restart`: whether optimizers forget their state at the start of every round (None: as the run's
    `restart_optimizers` says, the same for every method).
    """

    restart: bool | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Take a hook under its old name for one release."""
        super().__init_subclass__(**options)
        adopt(cls, {"tutor": "objective"})

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse, before training, a topology or a number of clients that this method cannot serve."""

    def check_public(self, counts: Sequence[int]) -> None:
        """Refuse, before training, so many rows that each client shows to others."""

    def check_together(self, topologies: Sequence[Topology], facts: Sequence[Facts], bound: str | None) -> None:
        """Refuse, before training, clients that do not go together, or what the schedule does with their segments.

        `topologies` and `facts`: one a client, with what `fit` has put in. `bound`: what the schedule does that takes
        client segments of one make, such as "averages client segments"; None where it leaves them alone.
        """

    def check_optimizers(self, optims: Mapping[str, Optim]) -> None:
        """Refuse, before training, optimizers (by role) whose steps this method cannot follow."""

    def settle(self, rounds: int) -> Method:
        """Return the method for a run of so many rounds: this one, unless something in it follows their number."""
        return self

    def broadcast(self, topology: Topology) -> tuple[str, ...]:
        """Return the client segments of which every client is sent the same weights before it first trains."""
        return ()

    @property
    def turned_off(self) -> str | None:
        """Return, in a line, why these parameters make the method do nothing at all, or None."""
        return None

    @property
    def bounded(self) -> str | None:
        """Return, in a line, why a plan counts more than this method may send, or None: it counts exactly that."""
        return None

    def fit(self, topology: Topology, facts: Facts, seed: int) -> Topology:
        """Return the topology to train: this one, unless the method adds segments or heads of its own to it."""
        return topology

    @property
    def fuses(self) -> bool:
        """Whether the method itself exchanges the clients' weights: then the schedule must not average them too."""
        return False

    def returns_weights(self, topology: Topology) -> bool:
        """Whether clients are sent "weights" before a round, and send such of the same names back after it."""
        return False

    @property
    def plain_update(self) -> bool:
        """Whether a step from the weights it was sent moves a client along the gradient of its own loss alone.

        Then whoever gets the weights back can work that gradient out.
        """
        return type(self).objective is Method.objective and not self.leads

    @property
    def sends_gradients(self) -> bool:
        """Whether clients take no step and send, as "weight gradient", the mean gradient of their rows' loss."""
        return False

    @property
    def of_steps_alone(self) -> bool:
        """Whether all that clients send learns from nothing but the gradients of steps that the schedule asks for.

        Then a promise for those gradients (`dp_sgd`) holds for what is sent as well.
        """
        return False

    @property
    def weighs_steps(self) -> bool:
        """Whether what is sent depends on how many rows each step had, which must then not be left to chance.

        Where it is, the number itself would tell of a row; and it is no weight of an expected size.
        """
        return False

    @property
    def varying(self) -> frozenset[str]:
        """The kinds of messages to the fed server of which the shapes, too, depend on the values that are learnt.

        No noise on the values hides that, so that nothing can be promised for them.
        """
        return frozenset()

    @property
    def reads_labels(self) -> bool:
        """Whether the labels of a step are read beside the loss, as classes: they must then be the client's own."""
        return False

    @property
    def leads(self) -> bool:
        """Whether `train` may take other steps than those that the schedule asks for."""
        return type(self).train is not Method.train

    @property
    def besides(self) -> bool:
        """Whether clients also learn before or after the schedule's round, in `query` or `fuse`.

        Then the schedule must leave the segments that they hold then in their place.
        """
        return False

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Train one client on these batches of an epoch, as the schedule asks; return the loss of each step.

        A method that overrides it may train in other steps, or in several passes; see `leads`.
        """
        return learner.train(epoch, batches, first)

    def kept(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments that never leave their client: neither averaged nor handed over."""
        return ()

    def objective(self, seat: ObjectivePlacement) -> LocalObjective | None:
        """Return who stands by the party at `seat`, or None."""
        return None

    def start(self, clients: int) -> State:
        """Return what the fed server keeps, before the first round: tensors and plain values."""
        return {}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Before round `number` is trained: tell the clients that take part what they need."""

    def fuse(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """After training: take from the clients that finished what they send, and fuse it into `state`.

        `shares`: lane -> its share of the examples of all that finished; they add up to one.
        """

    def class_means(self, topology: Topology) -> Mapping[str, str]:
        """Return kind of message -> the value of whose means, over a client's rows of a class, its tensors are made.

        Of messages from clients to the fed server, with a tensor for each class under the name of the class: what they
        show of the rows is for attacks to find out.
        """
        return {}

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Return the weights that the client would use now, named as `contents` names them; None: its own.

        They stand in for the client's own, as far as they go, whenever it is scored, asked for predictions or attacked.
        """
        return None

    def scored(self, topology: Topology) -> Collection[str]:
        """Return the values that `scores` computes with the weights that the client is scored with, and never others.

        Whoever scores the client's model has them at hand then, and the rows pass through it once: `compute` returns
        them whatever the client has been lent.
        """
        return ()

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return further scores of one client on `part`, name -> value, from an inference of the method's own."""
        return {}
