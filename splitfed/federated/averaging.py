"""The base of the methods that exchange weights: down before a round, up after it, fused to a mean.

What clients share starts from one broadcast state, that of the first client asked in the first round, whatever the
run's `starts` says: a mean of weights that were drawn apart is of no use. What a client keeps to itself starts as
`starts` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from splitfed.aggregation.running_mean import RunningMean
from splitfed.core.errors import InvalidInput
from splitfed.core.probe import Facts
from splitfed.core.topology import Topology
from splitfed.federated.base import Learner, Method, State
from splitfed.federated.objectives import trainable_names, weight_names
from splitfed.federated.shared_weights import check_alike
from splitfed.federated.topology_values import clients_hold_all, only_client


@dataclass(frozen=True, kw_only=True)
class Averaging(Method):
    """Sends what clients share down in `query` and up in `fuse`; a method writes what it does otherwise.

    `buffers`: whether batch-norm statistics are averaged with the weights, or stay each client's own. `weighted`:
    whether the mean weighs clients by their examples, or counts them alike. A client's optimizer goes on with its state
    (momentum) where it takes new weights, as under a split schedule, unless the run restarts optimizers.
    """

    who: ClassVar[str] = "averaging"
    what: ClassVar[str] = "model"

    buffers: bool = True
    weighted: bool = True

    @property
    def fuses(self) -> bool:
        """Weights are averaged here, and nowhere else."""
        return True

    def returns_weights(self, topology: Topology) -> bool:
        """Down and up; a method that sends something else says no."""
        return True

    def broadcast(self, topology: Topology) -> tuple[str, ...]:
        """All that is averaged."""
        return self.shared(topology)

    @property
    def of_steps_alone(self) -> bool:
        """Weights and what is worked out of their change; a method that reads rows in another way says no."""
        return True

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments that are averaged: all that the client holds."""
        return tuple(s.name for s in topology.segments_of(only_client(self.who, topology)))

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse clients that have nothing to share."""
        if not trainable_names(topology, self.shared(topology)):
            raise InvalidInput(f"{self.who} averages weights; the clients of topology {topology.name!r} hold none")

    def check_together(self, topologies: Sequence[Topology], facts: Sequence[Facts], bound: str | None) -> None:
        """Refuse segments that cannot be averaged, or that the schedule moves as well."""
        if bound is not None:
            raise InvalidInput(f"{self.who} averages weights itself, and the schedule {bound}: take 'independent'")
        check_alike(self.who, self.what, topologies, [self.shared(t) for t in topologies])

    def start(self, clients: int) -> State:
        """Nothing is known of the weights before the first client is asked."""
        return {"weights": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send every client that takes part what is shared."""
        for learner in learners:
            state["weights"] = state["weights"] or self.shared_tensors(learner, copies=True)
            self.begin(learner, learner.receive("weights", state["weights"], number), number, state)

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Let one client start round `number` from what has `arrived`."""
        learner.adopt(arrived)

    def fuse(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average what the clients that finished have learnt."""
        mean = RunningMean()
        for learner, part in self.parts(learners, shares):
            mean.add(learner.send("weights", self.shared_tensors(learner), number), part)
        state["weights"] = mean.value()

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Every client uses the newest average of what is shared."""
        return state["weights"] or None

    def shared_tensors(self, learner: Learner, copies: bool = False) -> dict[str, Tensor]:
        """Return what the client shares, as it is sent: its weights, and buffers where these go along."""
        names = self.shared(learner.topology)
        found = learner.contents(names, copies)
        if self.buffers:
            return found
        own = weight_names(learner.topology, names)
        return {name: tensor for name, tensor in found.items() if name in own}

    def parts(self, learners: Sequence[Learner], shares: Mapping[int, float]) -> list[tuple[Learner, float]]:
        """Return every client with its part in the mean; the parts add up to one."""
        even = 1.0 / len(learners)
        return [(learner, shares[learner.lane] if self.weighted else even) for learner in learners]


def check_whole(who: str, topology: Topology) -> None:
    """Refuse a topology whose clients do not hold the whole model."""
    only_client(who, topology)
    if not clients_hold_all(topology):
        others = [s.role for s in topology.segments if s.role not in topology.data_roles]
        raise InvalidInput(
            f"{who} trains whole models; in topology {topology.name!r} role {others[0]!r} holds a part: take "
            "splitfed.topologies.local"
        )


def score_value(learner: Learner, value: str, part: str) -> float:
    """Return the metric of the head on `value`, as the client's segments stand, on all rows of `part`."""
    task = next(head.task for head in learner.topology.heads if head.value == value)
    assert task is not None
    return task.metric(learner.compute(value, part), learner.labels(value, part))
