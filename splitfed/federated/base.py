"""The contract of a federated method: query, local objective, upload, aggregation, on any schedule and topology.

A method is a frozen value. It changes a client's training by a `LocalObjective` at one of the client's parties; before
and after the schedule trains a round, it exchanges messages between the clients' `Learner`s and the aggregation server.
A method sees the same `Learner` for a whole local model, a topology of one party, and for a split one.

A method sends through `Learner.send` and `Learner.receive` only, so everything it sends is counted, recorded and open
to attacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from splitfed.core.argument_kinds import check_overrides
from splitfed.core.errors import check_fields
from splitfed.federated.traits import MethodTraits as MethodTraits

if TYPE_CHECKING:
    from splitfed.core.local_objective import LocalObjective
    from splitfed.core.optimizers import Optim
    from splitfed.core.topology import Topology
    from splitfed.core.topology_facts import TopologyFacts
    from splitfed.federated.learner import Learner

State = dict[str, Any]


@dataclass(frozen=True)
class ObjectivePlacement:
    """Position of a local objective: the party in `role` of `replica` (None: a party shared by all replicas).

    `topology` and `facts` are the replica's, as the method's `fit` returned them. `seed`: for its random numbers.
    `modules`: the party's own, segment -> module, which it trains.
    """

    party: str
    role: str
    replica: int | None
    topology: Topology
    facts: TopologyFacts
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str]:
        """The role, as that of a learner's parties."""
        return (self.role,)


@dataclass(frozen=True)
class MethodContext:
    """Run on which a method is to train: its clients, their topologies and what the schedule does with them.

    `topologies` and `facts`: one a client, as `fit` returned them. `bound`: what the schedule does that needs client
    segments of the same architecture, such as "averages client segments"; None if it leaves them in place. `public`:
    the number of public rows of each client; `optimizers`: those of the clients, by role. A study's preflight knows
    neither of these two, and gives none.
    """

    topologies: Sequence[Topology]
    facts: Sequence[TopologyFacts]
    bound: str | None
    public: Sequence[int] = ()
    optimizers: Mapping[str, Optim] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all federated methods: every member is optional, and the defaults add nothing.

    `restart`: whether optimizers lose their state at the start of every round (None: as the run's `restart_optimizers`
    says, the same for every method).
    """

    restart: bool | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise `InvalidInput` for a method that overrides one of this class and takes other arguments."""
        super().__init_subclass__(**options)
        check_overrides(cls, Method)

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters that the metadata of their fields do not allow."""
        check_fields(self)

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of this method on `topology`, which is the one that `fit` returned.

        A subclass replaces those that differ: `return replace(super().traits(topology), aggregates_weights=True)`.
        """
        own_steps = type(self).train is not Method.train
        plain_update = type(self).objective is Method.objective and not own_steps
        return MethodTraits(own_steps=own_steps, plain_update=plain_update)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput`, before `fit`, for a topology or a number of clients that this method cannot train."""

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput`, before training, for clients, schedule, public rows or optimizers that do not fit."""

    def for_rounds(self, rounds: int) -> Method:
        """Return the method for a run of `rounds` rounds: `self`, unless a parameter depends on their number."""
        return self

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology to train: `topology`, unless the method adds segments or heads to it."""
        return topology

    def objective(self, placement: ObjectivePlacement) -> LocalObjective | None:
        """Return the local objective of the party at `placement`, or None."""
        return None

    def start(self, clients: int) -> State:
        """Return the aggregation server's state before the first round: tensors and plain values."""
        return {}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send the clients that take part what they need, before round `number` is trained."""

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Train one client on these batches of an epoch, as the schedule sets; return the loss of each step.

        A subclass that overrides it may train other steps or several passes; see `MethodTraits.own_steps`.
        """
        return learner.train(epoch, batches, first)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Receive the messages of the clients that finished, after training, and aggregate them into `state`.

        `shares`: replica -> its share of the examples of all that finished; they add up to one.
        """

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Return the weights that the client would use now, named as in `Learner.contents`; None: its own.

        They replace the client's own weights of the same names whenever it is scored, predicts, or is attacked.
        """
        return None

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return further scores of one client on `part`, name -> value, computed by the method's own inference."""
        return {}
