"""The base of the methods that exchange weights: sent down before a round, sent up after it, and averaged.

The average is a weighted mean, unless `aggregation` gives another rule, a secure sum, a quorum or a server step.
Settings that would break a method's formula are refused by name.

Shared segments start from one broadcast state, that of the first client selected in the first round, whatever the run's
`starts` says, because a mean of weights with different initial values is of no use. Segments that a client does not
share start as `starts` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
from splitfed.federated.topology_values import Roles, averaging_roles, clients_hold_all, held_by, only_client
from splitfed.federated.uploads import close_round, open_round, refuse_settings


@dataclass(frozen=True, kw_only=True)
class Averaging(Method):
    """Base of averaging methods: sends shared segments down in `query` and up in `aggregate`; a subclass adds the rest.

    `buffers`: whether batch-norm statistics are averaged with the weights, or kept by each client. `weighted`: whether
    the mean weights clients by their examples, or equally. A client's optimizer keeps its state (momentum) when it
    takes new weights, as under a split schedule, unless the run restarts optimizers. `aggregation`: a rule, by name,
    table or value, or an `UpdateAggregation` (a table of its settings); None: a plain mean.
    """

    who: ClassVar[str] = "averaging"
    what: ClassVar[str] = "model"
    refuses: ClassVar[Mapping[str, str]] = {}
    """Setting of `UpdateAggregation` that the method refuses -> the reason, one line."""

    buffers: bool = True
    weighted: bool = True
    aggregation: str | Mapping[str, Any] | AggregationRule | UpdateAggregation | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for unknown aggregation settings and for those in `refuses`."""
        super().__post_init__()
        object.__setattr__(self, "aggregation", update_aggregation_of(self.aggregation))
        refuse_settings(self.who, self.settings, self.refuses)

    @property
    def settings(self) -> UpdateAggregation:
        """The settings by which the aggregation server aggregates."""
        return update_aggregation_of(self.aggregation)

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging: weights are sent down and up; other segments stay at their client."""
        shared = self.shared(topology)
        own = [segment for role in topology.data_roles for segment in topology.segments_of(role)]
        return replace(
            super().traits(topology),
            aggregates_weights=True,
            role_federations=averaging_roles(topology, shared),
            aggregation=self.settings,
            # Under a secure sum the uploads are masked.
            returns_weights=self.settings.sum is None,
            # A subclass that reads rows otherwise than by training steps sets this to False.
            post_processing=True,
            message_values={"weights": FEATURES},
            private_segments=tuple(s.name for s in own if s.name not in shared),
            broadcast_segments=shared,
        )

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments that are averaged: all that the client, or the parties of a group, hold."""
        return tuple(s.name for s in topology.segments if s.role in topology.data_roles)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for clients without weights to share."""
        if not trainable_names(topology, self.shared(topology)):
            raise InvalidInput(f"{self.who} averages weights; the clients of topology {topology.name!r} hold none")

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for segments that cannot be averaged, and for a schedule that also moves weights."""
        check_unbound(self.who, "weights", context.bound)
        check_alike(self.who, self.what, context.topologies, [self.shared(t) for t in context.topologies])

    def start(self, clients: int) -> State:
        """Return the state before the first client sends its weights."""
        return {"weights": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send the shared segments to every client that takes part in round `number`."""
        for learner in learners:
            state["weights"] = state["weights"] or self.shared_tensors(learner, copies=True)
            self.begin(learner, learner.receive("weights", state["weights"], number), number, state)
        open_round(self.settings, learners, number, state)

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Start round `number` at one client from the tensors that `arrived`."""
        learner.adopt(arrived)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the shared segments of the clients that finished."""
        uploads = ((one, part, {"weights": self.shared_tensors(one)}) for one, part in self.parts(learners, shares))
        found = close_round(self.settings, uploads, number, state, self.weighted)
        state["weights"] = take_step(self, learners[0], found["weights"], state)

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Return the newest average of the shared segments; None if there is none yet."""
        return state["weights"] or None

    def shared_tensors(self, learner: LearnerWeights, copies: bool = False) -> dict[str, Tensor]:
        """Return the tensors that a client sends: its shared weights, and buffers if `buffers` is set."""
        names = shared_at(self, learner)
        found = learner.contents(names, copies)
        if self.buffers:
            return found
        own = weight_names(learner.topology, names)
        return {name: tensor for name, tensor in found.items() if name in own}

    def parts(self, learners: Sequence[Learner], shares: Mapping[int, float]) -> list[tuple[Learner, float]]:
        """Return every client with its weight in the mean; the weights add up to one."""
        even = 1.0 / len(learners)
        return [(learner, shares[learner.replica] if self.weighted else even) for learner in learners]


def shared_at(method: Averaging, parties: Roles) -> tuple[str, ...]:
    """Return those of the segments that `method` averages which these parties hold."""
    return held_by(parties, method.shared(parties.topology))


def take_step(
    method: Averaging, learner: Learner, after: Mapping[str, Tensor], state: State, rate: float = 1.0
) -> dict[str, Tensor]:
    """Return the aggregation server's tensors after a round: the aggregate `after`, or a server step towards it.

    `rate`: the fraction of the difference by which weights move towards `after`; 1 takes `after` itself.
    """
    shared, before, moved = shared_at(method, learner), state["weights"], dict(after)
    for name in trainable_names(learner.topology, shared) if rate != 1.0 else ():
        moved[name] = before[name] + rate * (after[name] - before[name])
    return take_server_step(method.settings, learner, shared, before, moved, state)


def check_whole(who: str, topology: Topology) -> None:
    """Raise `InvalidInput` for a topology whose clients do not hold the whole model."""
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
