"""One client of a run as a federated method sees it: data, training, outputs, weights, and the link to the server.

A method gets a `Learner`, which joins the contracts below; a function that needs only one of them takes that one.
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
    """Identity of the client, and the seed for its random numbers."""

    @property
    def replica(self) -> int:
        """The client's number."""

    @property
    def topology(self) -> Topology:
        """The client's topology."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose parties the learner stands for: all of the client that own data, or one of them."""

    @property
    def seed(self) -> int:
        """The run's seed; derive generators from it by purpose, and by `replica` for values of one client."""


class LearnerData(LearnerIdentity, Protocol):
    """The client's own rows and labels, and the public rows received from other clients."""

    def rows(self, part: str = "train") -> int:
        """Return the number of rows in `part`; "public" is the part of "train" that other clients receive."""

    @property
    def shown(self) -> Tensor:
        """Row numbers of the public rows in "train": (rows,) int64, on the CPU."""

    def inputs(self, part: str = "train") -> dict[str, Tensor]:
        """Return the client's raw inputs in `part`: name -> (rows, ...)."""

    def labels(self, head: str, part: str = "train") -> Tensor:
        """Return the client's labels of `head` in `part`, as they are used in training: (rows,)."""

    def hold(
        self, part: str, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], origins: RowOrigins | None = None
    ) -> None:
        """Store further rows as `part`, such as public rows of other clients: input or head -> (rows, ...).

        `origins`: the clients that own the rows, so that a private mechanism's use of them is counted for those clients
        (default: all others). Labels are used unchanged. The rows are not part of the run's saved state: the caller
        stores them again after a resume.
        """


class LearnerTraining(LearnerIdentity, Protocol):
    """Steps over the client's topology: its optimizers, its local objectives and its gradient."""

    def train(
        self, epoch: int, batches: Sequence[Tensor], first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Take one training step a batch (row numbers of `part`) over the client's topology; return the losses.

        `task` multiplies the task's own losses: at 0 no label is sent, and only local objectives are trained.
        """

    def gradient(self, batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over the rows of `batches` of "train", as `segment/name` -> tensor.

        For a whole model, in training mode; weights and buffers do not change.
        """

    @property
    def rate(self) -> float:
        """The current learning rate of the client's optimizers (the first party's, where it has several)."""

    @property
    def optim(self) -> Optim:
        """The optimizer settings of the client (the first party's, where it has several)."""

    def momentum(self) -> dict[str, Tensor]:
        """Return the momentum of the client's optimizers, as `segment/name` -> tensor of the weight's shape.

        The optimizers' own tensors, which the next step changes. Empty for optimizers without momentum, before their
        first step, and after a restart.
        """

    def separate_optimizer(self, name: str, rate: float | None = None) -> AbstractContextManager[None]:
        """Let steps inside the block go on from an optimizer state of their own, at every party of the client.

        Its `name` tells it from others: it is empty at first, outlasts the block, and is forgotten where optimizers are
        restarted. All other steps find their state, such as momentum, as they left it. `rate`: the learning rate inside
        the block (None: the one of all other steps).
        """

    @property
    def objectives(self) -> Mapping[str, LocalObjective]:
        """The local objectives at the client's own parties, by role; empty in a plan, where nothing is computed."""

    def objective(self, role: str) -> LocalObjective | None:
        """Return the local objective of the party in `role`, the client's own or a shared one; None in a plan."""


class LearnerOutputs(LearnerIdentity, Protocol):
    """Outputs of the client's model, in evaluation mode."""

    def consult(self, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        """Return the model's output `value` for `rows` of `part`, (rows, ...), at the party that computes it.

        In evaluation mode, with the current weights and the defenses; messages are counted as those of training. Call
        it at most once a round `number` and part, so that defenses draw new noise.
        """

    def compute(self, value: str, part: str = "train") -> Tensor:
        """Return `value` of all rows of `part`, (rows, ...), in evaluation mode, at the party that computes it.

        Only for values that the client's own segments compute from its own inputs, so that no message is sent. Raises
        `InvalidInput` for any other value.
        """


class LearnerWeights(LearnerIdentity, Protocol):
    """The weights and buffers that the client holds, as `segment/name` -> tensor."""

    def at(self, role: str) -> Self:
        """Return the client's party in `role` alone: its weights, objectives and messages; see `groups`."""

    def contents(self, segments: Sequence[str], copies: bool = True) -> dict[str, Tensor]:
        """Return copies of the weights and buffers of the client's `segments`, as `segment/name` -> tensor.

        Without `copies` they are the client's own tensors: send them at once (which copies them) and do not keep them.
        """

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the client's tensors by `tensors`, named as in `contents`; optimizer state is kept."""

    def lend(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Within the block, let the client's segments use `tensors`; afterwards they have their own again.

        Segments and buffers that are not among them keep the client's values. For `compute` and `gradient`, not to
        train.
        """


class LearnerMessages(LearnerIdentity, Protocol):
    """The client's messages to and from the aggregation server, the only channel between them."""

    @property
    def pseudonym(self) -> int:
        """Number by which a step's `Stamp` names the client to every party."""

    def send(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Send `tensors` to the aggregation server in round `number` as a message of `kind`; return what it received.

        `role`: the sender, among the parties that serve the client (default: the client itself).
        """

    def receive(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Send `tensors` from the aggregation server to the client as a message of `kind`; return the received tensors.

        `role`: the receiver, among the parties that serve the client (default: the client itself).
        """


class Learner(LearnerData, LearnerTraining, LearnerOutputs, LearnerWeights, LearnerMessages, Protocol):
    """One client of a run as a method sees it: all contracts of this module together."""
