"""One client of a run as a federated method sees it: data, training, outputs, weights, and the link to the server.

A method gets a `Learner`, which is all of these contracts together; a function that needs one of them names that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, Self

from torch import Tensor

if TYPE_CHECKING:
    from splitfed.core.local_objective import LocalObjective
    from splitfed.core.optimizers import Optim
    from splitfed.core.topology import Topology
    from splitfed.core.usage_counts import RowOrigins


class LearnerIdentity(Protocol):
    """Who the client is, and the seed that what it draws is derived from."""

    @property
    def replica(self) -> int:
        """Which client it is."""

    @property
    def topology(self) -> Topology:
        """The client's topology."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose parties the learner stands for: all of the client that own data, or one of them."""

    @property
    def seed(self) -> int:
        """The run's seed, to be derived from: by purpose, and by `replica` for what is one client's."""


class LearnerData(LearnerIdentity, Protocol):
    """The client's own rows and labels, and rows that others have shown it."""

    def rows(self, part: str = "train") -> int:
        """Return how many rows the client has in `part`; "public" is the part of "train" that it shows to others."""

    @property
    def shown(self) -> Tensor:
        """Which rows of "train" are the public ones: (rows,) int64, on the CPU."""

    def inputs(self, part: str = "train") -> dict[str, Tensor]:
        """Return the client's raw inputs in `part`: name -> (rows, ...)."""

    def labels(self, head: str, part: str = "train") -> Tensor:
        """Return the client's labels of `head` in `part`, as it trains on them: (rows,)."""

    def hold(
        self, part: str, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], origins: RowOrigins | None = None
    ) -> None:
        """Keep further rows under the name `part`, such as those that others have shown: input or head -> (rows, ...).

        `origins`: whose rows they are, so that what a private mechanism is used for is counted for the right ones
        (default: all others'). Labels are trained on as they are given. The rows are no state of the run: who holds
        such rows gives them again after a resume.
        """


class LearnerTraining(LearnerIdentity, Protocol):
    """Steps over the client's topology: its optimizers, its local objectives and its gradient."""

    def train(
        self, epoch: int, batches: Sequence[Tensor], first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Take a training step a batch (row numbers of `part`) over the client's topology; return the losses.

        `task` multiplies the task's own losses: at 0 no label crosses, and only local objectives are learnt.
        """

    def gradient(self, batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over the rows of `batches` of "train", as `segment/name` -> tensor.

        Of a whole model, in training mode; no weight moves and no buffer changes.
        """

    @property
    def rate(self) -> float:
        """The learning rate that the client's optimizers stand at (the first party's, where it has several)."""

    @property
    def optim(self) -> Optim:
        """The optimizer as it was asked for (the first party's, where the client has several)."""

    def momentum(self) -> dict[str, Tensor]:
        """Return the momentum that the client's optimizers hold, as `segment/name` -> tensor of the weight's shape.

        Their own tensors, which the next step changes. Empty for optimizers without one, before their first step, and
        after a restart.
        """

    def separate_optimizer(self, name: str, rate: float | None = None) -> AbstractContextManager[None]:
        """Let steps inside the block go on from an optimizer state of their own, at every party of the client.

        Its `name` tells it from others: it is empty at first, outlasts the block, and is forgotten where optimizers are
        restarted. All other steps find their state, such as momentum, as they left it. `rate`: the learning rate inside
        the block (None: the one of all other steps).
        """

    @property
    def objectives(self) -> Mapping[str, LocalObjective]:
        """The local objectives at the client's own parties, by role; none where nothing is computed, as in a plan."""

    def objective(self, role: str) -> LocalObjective | None:
        """Return the local objective at the client's party of `role`, its own or one of all; None in a plan."""


class LearnerOutputs(LearnerIdentity, Protocol):
    """What the client's model says of rows, in evaluation mode."""

    def consult(self, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        """Return the model's output `value` for some `rows` of `part`, (rows, ...), at the party that makes it.

        In evaluation mode, with the segments as they train, and the defenses; what crosses is counted as training's.
        Once a round `number` and part, so that defenses draw afresh.
        """

    def compute(self, value: str, part: str = "train") -> Tensor:
        """Return `value` of all rows of `part`, (rows, ...), in evaluation mode, at the party that makes it.

        Only for what the client's own segments make of its own inputs: nothing crosses. Raises `InvalidInput` for
        any other value.
        """


class LearnerWeights(LearnerIdentity, Protocol):
    """The weights and buffers that the client holds, as `segment/name` -> tensor."""

    def at(self, role: str) -> Self:
        """Return the client's party in `role` alone: its weights, objectives and messages; see `groups`."""

    def contents(self, segments: Sequence[str], copies: bool = True) -> dict[str, Tensor]:
        """Return copies of the weights and buffers of the client's `segments`, as `segment/name` -> tensor.

        Without `copies` they are the client's own, to be sent at once (which copies them) and not to be kept.
        """

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Put `tensors`, named as `contents` names them, in place of the client's; optimizer state stays."""

    def lend(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let the client's segments hold `tensors` inside the block; what they hold themselves is not touched.

        Segments and buffers that are not among them stay the client's own. For `compute` and `gradient`, not to train.
        """


class LearnerMessages(LearnerIdentity, Protocol):
    """The link between the client and the aggregation server: the only way to it."""

    def send(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Send `tensors` to the aggregation server in round `number` as a message of `kind`; return what has arrived.

        `role`: who sends, of the parties that serve the client (default: the client itself).
        """

    def receive(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Send `tensors` from the aggregation server to the client as a message of `kind`; return what has arrived.

        `role`: who receives, as in `send`.
        """


class Learner(LearnerData, LearnerTraining, LearnerOutputs, LearnerWeights, LearnerMessages, Protocol):
    """One client of a run as a method sees it: all narrow contracts together."""
