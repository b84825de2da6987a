"""The contract of a federated method: query, local objective, upload, aggregation, on any schedule and topology.

A method is a frozen value. What a client adds to its own training is a `LocalObjective` at one of its parties; what a
round brings, before and after the schedule has trained, happens between the clients' `Learner`s and the aggregation
server. A whole local model is a topology of one party; a split one is any other: a method sees the same `Learner` in
both cases.

All that a method sends goes through `Learner.send` and `Learner.receive`: it is counted, recorded and can be attacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
    """Where a local objective would stand: the party in `role` of `replica` (None: one party for all replicas).

    `topology` and `facts` are the replica's, with whatever the method's `fit` has put in. `seed`: of what it draws.
    """

    party: str
    role: str
    replica: int | None
    topology: Topology
    facts: TopologyFacts
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def roles(self) -> tuple[str]:
        """The role, as that of a learner's parties."""
        return (self.role,)


@dataclass(frozen=True)
class MethodContext:
    """What a method is to run on: the clients, what each has, and what the schedule does with them.

    `topologies` and `facts`: one a client, with what `fit` has put in. `bound`: what the schedule does that takes
    client segments of one make, such as "averages client segments"; None where it leaves them alone. `public`: how many
    rows each client shows to others; `optimizers`: those of the clients, by role. A study's preflight knows neither of
    these two, and gives none.
    """

    topologies: Sequence[Topology]
    facts: Sequence[TopologyFacts]
    bound: str | None
    public: Sequence[int] = ()
    optimizers: Mapping[str, Optim] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods: everything is optional, the defaults add nothing.

    `restart`: whether optimizers forget their state at the start of every round (None: as the run's
    `restart_optimizers` says, the same for every method).
    """

    restart: bool | None = None

    def __post_init__(self) -> None:
        """Refuse parameters that are not what their fields require."""
        check_fields(self)

    def traits(self, topology: Topology) -> MethodTraits:
        """Return what this method is on `topology`, as `fit` has left it.

        A method says what differs: `return replace(super().traits(topology), aggregates_weights=True)`.
        """
        own_steps = type(self).train is not Method.train
        plain_update = type(self).objective is Method.objective and not own_steps
        return MethodTraits(own_steps=own_steps, plain_update=plain_update)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse, before `fit`, a topology or a number of clients that this method cannot serve."""

    def check_run(self, context: MethodContext) -> None:
        """Refuse, before training, clients that do not go together, or a schedule, public rows or optimizers."""

    def for_rounds(self, rounds: int) -> Method:
        """Return the method for a run of so many rounds: this one, unless something in it follows their number."""
        return self

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology to train: this one, unless the method adds segments or heads of its own to it."""
        return topology

    def objective(self, placement: ObjectivePlacement) -> LocalObjective | None:
        """Return the local objective of the party at `placement`, or None."""
        return None

    def start(self, clients: int) -> State:
        """Return what the aggregation server keeps, before the first round: tensors and plain values."""
        return {}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Before round `number` is trained: tell the clients that take part what they need."""

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Train one client on these batches of an epoch, as the schedule asks; return the loss of each step.

        A method that overrides it may train in other steps, or in several passes; see `MethodTraits.own_steps`.
        """
        return learner.train(epoch, batches, first)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """After training: take from the clients that finished what they send, and aggregate it into `state`.

        `shares`: replica -> its share of the examples of all that finished; they add up to one.
        """

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Return the weights that the client would use now, named as `contents` names them; None: its own.

        They stand in for the client's own, as far as they go, whenever it is scored, asked for predictions or attacked.
        """
        return None

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return further scores of one client on `part`, name -> value, from an inference of the method's own."""
        return {}
