"""The base of the methods that exchange weights: down before a round, up after it, averaged.

The average is a weighted mean, unless `aggregation` says otherwise: another rule, a secure sum, a quorum, a server
step. Where a method's own formula rests on the mean, what would break it is refused by name.

What clients share starts from one broadcast state, that of the first client asked in the first round, whatever the
run's `starts` says: a mean of weights that were drawn apart is of no use. What a client keeps to itself starts as
`starts` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from splitfed.aggregation.base import AggregationRule
from splitfed.aggregation.update_aggregation import UpdateAggregation, update_aggregation_of
from splitfed.core.errors import InvalidInput
from splitfed.core.private_values import FEATURES
from splitfed.core.topology import Topology
from splitfed.federated.base import Method, MethodContext, MethodTraits, State
from splitfed.federated.learner import Learner, LearnerWeights
from splitfed.federated.objectives import trainable_names, weight_names
from splitfed.federated.shared_weights import check_alike, check_unbound, take_server_step
from splitfed.federated.topology_values import clients_hold_all, only_client
from splitfed.federated.uploads import close_round, open_round, refuse_settings


class Roles(Protocol):
    """The roles of some parties in a topology: those of a learner, or of a local objective's place."""

    @property
    def topology(self) -> Topology:
        """The topology."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles."""


@dataclass(frozen=True, kw_only=True)
class Averaging(Method):
    """Sends what clients share down in `query` and up in `aggregate`; a method writes what it does otherwise.

    `buffers`: whether batch-norm statistics are averaged with the weights, or stay each client's own. `weighted`:
    whether the mean weighs clients by their examples, or counts them alike. A client's optimizer goes on with its state
    (momentum) where it takes new weights, as under a split schedule, unless the run restarts optimizers. `aggregation`:
    a rule, by name, table or value, or an `UpdateAggregation` (a table of its settings); None: a plain mean.
    """

    who: ClassVar[str] = "averaging"
    what: ClassVar[str] = "model"
    whole: ClassVar[bool] = False
    """Whether clients must hold the whole model."""

    refuses: ClassVar[Mapping[str, str]] = {}
    """Setting of `UpdateAggregation` that the method cannot have -> why, in a line."""

    buffers: bool = True
    weighted: bool = True
    aggregation: str | Mapping[str, Any] | AggregationRule | UpdateAggregation | None = None

    def __post_init__(self) -> None:
        """Refuse settings of the aggregation that there are not, or that break the method's formula."""
        super().__post_init__()
        object.__setattr__(self, "aggregation", update_aggregation_of(self.aggregation))
        refuse_settings(self.who, self.settings, self.refuses)

    @property
    def settings(self) -> UpdateAggregation:
        """How the aggregation server aggregates."""
        return update_aggregation_of(self.aggregation)

    def traits(self, topology: Topology) -> MethodTraits:
        """Weights go down and up, and are averaged here alone; what is not shared stays with its client."""
        shared = self.shared(topology)
        own = [segment for role in topology.data_roles for segment in topology.segments_of(role)]
        sharing = {s.role for s in map(topology.segment, shared) if s.module.state_dict()}
        return replace(
            super().traits(topology),
            aggregates_weights=True,
            role_federations=tuple(r for r in topology.data_roles if r in sharing and len(topology.data_roles) > 1),
            aggregation=self.settings,
            # Under a secure sum what comes back is masked.
            returns_weights=self.settings.sum is None,
            # A method that reads rows in another way than by steps says no.
            post_processing=True,
            message_values={"weights": FEATURES},
            private_segments=tuple(s.name for s in own if s.name not in shared),
            broadcast_segments=shared,
        )

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments that are averaged: all that the client, or the parties of a group, hold."""
        return tuple(s.name for s in topology.segments if s.role in topology.data_roles)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse clients that have nothing to share, and those that hold a part of the model where it must be whole."""
        if self.whole:
            check_whole(self.who, topology)
        if not trainable_names(topology, self.shared(topology)):
            raise InvalidInput(f"{self.who} averages weights; the clients of topology {topology.name!r} hold none")

    def check_run(self, context: MethodContext) -> None:
        """Refuse segments that cannot be averaged, or that the schedule moves as well."""
        check_unbound(self.who, "weights", context.bound)
        check_alike(self.who, self.what, context.topologies, [self.shared(t) for t in context.topologies])

    def start(self, clients: int) -> State:
        """Nothing is known of the weights before the first client is asked."""
        return {"weights": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send every client that takes part what is shared."""
        for learner in learners:
            state["weights"] = state["weights"] or self.shared_tensors(learner, copies=True)
            self.begin(learner, learner.receive("weights", state["weights"], number), number, state)
        open_round(self.settings, learners, number, state)

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Let one client start round `number` from what has `arrived`."""
        learner.adopt(arrived)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average what the clients that finished have learnt."""
        uploads = ((one, part, {"weights": self.shared_tensors(one)}) for one, part in self.parts(learners, shares))
        found = close_round(self.settings, uploads, number, state, self.weighted)
        state["weights"] = take_step(self, learners[0], found["weights"], state)

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Every client uses the newest average of what is shared."""
        return state["weights"] or None

    def shared_tensors(self, learner: LearnerWeights, copies: bool = False) -> dict[str, Tensor]:
        """Return what the client shares, as it is sent: its weights, and buffers where these go along."""
        names = shared_at(self, learner)
        found = learner.contents(names, copies)
        if self.buffers:
            return found
        own = weight_names(learner.topology, names)
        return {name: tensor for name, tensor in found.items() if name in own}

    def parts(self, learners: Sequence[Learner], shares: Mapping[int, float]) -> list[tuple[Learner, float]]:
        """Return every client with its part in the mean; the parts add up to one."""
        even = 1.0 / len(learners)
        return [(learner, shares[learner.replica] if self.weighted else even) for learner in learners]


def shared_at(method: Averaging, parties: Roles) -> tuple[str, ...]:
    """Return those of the segments that `method` averages which these parties hold."""
    topology = parties.topology
    return tuple(name for name in method.shared(topology) if topology.segment(name).role in parties.roles)


def take_step(
    method: Averaging, learner: Learner, after: Mapping[str, Tensor], state: State, rate: float = 1.0
) -> dict[str, Tensor]:
    """Return what the aggregation server holds after the aggregate `after`: that, or a step from what it held.

    `rate`: how far towards `after` the weights go; 1: all the way.
    """
    shared, before, moved = shared_at(method, learner), state["weights"], dict(after)
    for name in trainable_names(learner.topology, shared) if rate != 1.0 else ():
        moved[name] = before[name] + rate * (after[name] - before[name])
    return take_server_step(method.settings, learner, shared, before, moved, state)


def check_whole(who: str, topology: Topology) -> None:
    """Refuse a topology whose clients do not hold the whole model."""
    only_client(who, topology)
    if not clients_hold_all(topology):
        others = [s.role for s in topology.segments if s.role not in topology.data_roles]
        raise InvalidInput(
            f"{who} trains whole models; in topology {topology.name!r} role {others[0]!r} holds a part: take "
            "splitfed.topologies.local"
        )


def score_average(learner: Learner, value: str, part: str, state: State) -> dict[str, float]:
    """Return the metric of the head on `value`, by the averaged weights, on all rows of `part`, as "global".

    Empty before there is an average, and on split replicas, whose clients cannot make `value` by themselves.
    """
    if not state["weights"] or not clients_hold_all(learner.topology):
        return {}
    task = next(head.task for head in learner.topology.heads if head.value == value)
    assert task is not None
    with learner.lend(state["weights"]):
        return {"global": float(task.metric(learner.compute(value, part), learner.labels(value, part)))}
