"""The contracts of an engine as schedules and runs use it; `splitfed.engines.engine` joins all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from splitfed.core.messages import FED as FED

if TYPE_CHECKING:
    from splitfed.aggregation.base import AggregationRule
    from splitfed.core.defense import Defense
    from splitfed.core.executor import Combine
    from splitfed.core.optimizers import Optim
    from splitfed.core.topology import Topology
    from splitfed.core.topology_facts import TopologyFacts
    from splitfed.secure_sum.base import SecureSumPlan

Source = int | str | Mapping[str, Tensor]
"""Source of client segments: a replica's number, `FED`, or tensors `segment/name` to put into the client's own."""


Batches = Sequence[Tensor]
"""Row numbers, (rows,) int64, a tensor a step."""

ReplicaBatches = Mapping[int, Tensor]
"""The batch of each replica in one step: row numbers, (rows,) int64."""

ReplicaEpochs = Mapping[int, Sequence[tuple[int, Sequence[Tensor]]]]
"""What each replica trains on: for each of its epochs, the epoch's number and the batches."""


@dataclass(frozen=True)
class Placement:
    """What a schedule needs beyond one party for each client and one for each shared role.

    `copied`: shared roles of which every replica trains a copy; the copies live at the role's own party. `averaged`:
    client roles whose weights the aggregation server averages. `buffers`: True averages buffers (batch-norm statistics)
    of these roles too, False leaves them with each client. `kept`: segments that never leave their client.
    `aggregation_server`: True if one exists although no weights are averaged. `aggregation`: the rule by which both
    servers combine several copies (None: the mean). `secure`: the secure sum that hides the clients' uploads.
    """

    copied: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ()
    buffers: bool = True
    kept: tuple[str, ...] = ()
    aggregation_server: bool = False
    aggregation: AggregationRule | None = None
    secure: SecureSumPlan | None = None


@dataclass(frozen=True)
class Prediction:
    """Model outputs by head for a number of rows, and the labels of these rows.

    `made`: intermediate values that were requested in addition.
    """

    outputs: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    further_values: Mapping[str, Tensor] = field(default_factory=dict)


class Trainer(Protocol):
    """The interface of a schedule to an engine: training steps of replicas, and weights moved between parties.

    `topology`: that of the first replica; the others' have the same roles. `replicas`: the number of clients.
    """

    topology: Topology
    replicas: int

    def rows(self, replica: int, part: str) -> int:
        """Return the number of rows of `replica` in `part`."""

    def train(self, replica: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Train the client replica `replica` one step a batch; return the loss of each step whose batch is not empty.

        `batches`: row numbers of the client's part "train", (rows,) int64 each. `first`: the number of the first batch
        in its epoch. A loss is the sum over heads, each times its weight.
        """

    def train_at_once(self, turns: ReplicaEpochs) -> dict[int, list[float]]:
        """Train several replicas on their batches, in parallel on a simulated clock; return the losses by replica.

        They are computed one after another, with the same bits as in parallel.
        """
        return {
            replica: [x for epoch, steps in turn for x in self.train(replica, epoch, steps)]
            for replica, turn in turns.items()
        }

    def train_together(
        self, epoch: int, step: int, batches: ReplicaBatches, scales: Scales, combine: Combine | None = None
    ) -> dict[int, float]:
        """Take one step of every party on the sum of the replicas' losses, each times its scale; return the losses.

        `combine` replaces the gradients of all replicas on an edge (see `executor.exchange_together`); without it the
        replicas go one after another, and no more than one replica's activations are held.
        """

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Send the weights of `role` from one replica's party to another's, directly or through the party `via`."""

    def download(self, replicas: Sequence[int], epoch: int) -> None:
        """Send the aggregation server's weights to the parties of `replicas` in every role that is averaged."""

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Send the averaged roles' weights of these replicas to the aggregation server, which keeps their aggregate."""

    def branch(self, replicas: Sequence[int]) -> None:
        """Start the copies of every copied role from the newest merged one; sends no message."""

    def merge(self, weights: Mapping[int, float]) -> None:
        """Replace every copied role's segments by the aggregate of its copies; sends no message."""


class RunSetup(Protocol):
    """Settings of a run: topologies and shapes by replica, defenses, optimizers by role, seed and device.

    `accumulate`: the number of batches in one optimizer step.
    """

    topologies: Sequence[Topology]
    all_facts: Sequence[TopologyFacts]
    defenses: tuple[Defense, ...]
    optims: Mapping[str, Optim]
    accumulate: int
    seed: int
    device: torch.device


class Stateful(Protocol):
    """Object with a state that a checkpoint saves: tensors and plain values."""

    def state(self) -> dict[str, Any]:
        """Return the state."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""


Scales = Mapping[int, float]
"""Replica -> the factor of its loss."""
