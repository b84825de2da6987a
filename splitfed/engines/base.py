"""What schedules and runs ask of an engine, in narrow contracts; `splitfed.engines.engine` has all of them."""

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
"""Whose client segments are meant: those of a replica, those that `FED` holds, or the client's own with other tensors
in them, named `segment/name`."""


Batches = Sequence[Tensor]
"""Row numbers, (rows,) int64, a tensor a step."""

ReplicaBatches = Mapping[int, Tensor]
"""The batch of each replica in one step: row numbers, (rows,) int64."""

ReplicaEpochs = Mapping[int, Sequence[tuple[int, Sequence[Tensor]]]]
"""What each replica trains on: for each of its epochs, the epoch's number and the batches."""


@dataclass(frozen=True)
class Placement:
    """What a schedule asks for beside one party a client and one a shared role.

    `copied`: shared roles of which every replica trains a copy; the copies live at the role's own party. `averaged`:
    roles of the clients whose weights the aggregation server averages. `buffers`: whether buffers (batch-norm
    statistics) of averaged roles go along, or stay each client's own. `kept`: segments that never leave their client.
    `aggregation_server`: whether there is one though no weights are averaged. `aggregation`: how both servers make one
    of several (None: the mean). `secure`: the aggregation server learns the clients' sum alone.
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
    """Model outputs by head for a number of rows, and the labels that their holder has for them.

    `made`: values on the way to the outputs that were asked for besides.
    """

    outputs: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    further_values: Mapping[str, Tensor] = field(default_factory=dict)


class Trainer(Protocol):
    """What a schedule may ask for: steps over replicas, and weights moved between parties.

    `topology`: that of the first replica; the others' have the same roles. `replicas`: how many clients there are.
    """

    topology: Topology
    replicas: int

    def rows(self, replica: int, part: str) -> int:
        """Return how many rows `replica` has in `part`."""

    def train(self, replica: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Train the client replica `replica` one step a batch; return the loss of each step whose batch is not empty.

        `batches`: row numbers of the client's part "train", (rows,) int64 each. `first`: the number that the first
        batch has in its epoch. A loss is the sum over heads, each times its weight.
        """

    def train_at_once(self, turns: ReplicaEpochs) -> dict[int, list[float]]:
        """Train several replicas, each on its turns, at the same time as a clock sees it; return the losses by replica.

        Computed one replica after another, which gives each the same bits.
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
        """Let the copies of every copied role start from the newest merged one; nothing crosses."""

    def merge(self, weights: Mapping[int, float]) -> None:
        """Replace every copied role's segments by the aggregate of its copies; nothing crosses."""


class RunSetup(Protocol):
    """What a run was made from: topologies and shapes by replica, defenses, optimizers by role, seed and device.

    `accumulate`: after how many batches the optimizers take a step.
    """

    topologies: Sequence[Topology]
    all_facts: Sequence[TopologyFacts]
    defenses: tuple[Defense, ...]
    optims: Mapping[str, Optim]
    accumulate: int
    seed: int
    device: torch.device


class Stateful(Protocol):
    """Has a state that a checkpoint keeps: tensors and plain values."""

    def state(self) -> dict[str, Any]:
        """Return the state."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""


Scales = Mapping[int, float]
"""Replica -> the factor of its loss."""
