"""Simulation of the rounds of a run, schedule and federated method, without computation, beside a simulated clock.

The trainer of the clock forwards the calls of a schedule, to parties that count or that train, and moves the clock by
their duration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.executor import Combine
from splitfed.core.topology import Topology
from splitfed.costs.clock import Clock, party_names
from splitfed.costs.measure import segment_flops
from splitfed.costs.speeds import Speeds
from splitfed.costs.steps import StepShape, step_shape
from splitfed.engines.base import FED, Placement, ReplicaBatches, ReplicaEpochs, Scales, Trainer
from splitfed.federated.groups import start_state
from splitfed.federated.learner import Learner
from splitfed.planning.counting import CountingLearner, CountingTrainer
from splitfed.planning.method_clock import MethodClock
from splitfed.planning.rounds import ForwardingTrainer, MethodTrainer, aggregate, query
from splitfed.planning.validation import Prepared, labels_of
from splitfed.planning.weight_flows import WeightFlows
from splitfed.secure_sum.base import Flow


class TimedTrainer(ForwardingTrainer):
    """Forwards everything to `inner` and moves `clock` by its duration. Averages in place take no time.

    `method_clock`: the steps that a federated method really took, if it controls the clients' training.
    """

    def __init__(
        self,
        inner: Trainer,
        clock: Clock,
        topologies: Sequence[Topology],
        placement: Placement,
        method_clock: MethodClock | None = None,
    ) -> None:
        super().__init__(inner)
        self.clock, self.method_clock = clock, method_clock
        self._flows = WeightFlows(topologies, placement)

    def train(self, replica: int, epoch: int, batches: Sequence[Tensor], first: int = 0) -> list[float]:
        """Train one replica; all others wait."""
        losses = super().train(replica, epoch, batches, first)
        self.clock.train(
            {replica: _sizes(batches) if self.method_clock is None else self.method_clock.pop_steps(replica)}
        )
        return losses

    def train_at_once(self, turns: ReplicaEpochs) -> dict[int, list[float]]:
        """Train all replicas in parallel."""
        losses = self.inner.train_at_once(turns)
        taken = {k: [n for _, batches in turn for n in _sizes(batches)] for k, turn in turns.items()}
        self.clock.train(
            taken if self.method_clock is None else {replica: self.method_clock.pop_steps(replica) for replica in turns}
        )
        return losses

    def train_together(
        self, epoch: int, step: int, batches: ReplicaBatches, scales: Scales, combine: Combine | None = None
    ) -> dict[int, float]:
        """Take one joint step of all replicas in parallel; the backward pass starts after the slowest forward pass."""
        losses = super().train_together(epoch, step, batches, scales, combine)
        self.clock.together({replica: len(rows) for replica, rows in batches.items()})
        return losses

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Hand weights over; all parties wait."""
        super().hand_over(source, target, role, epoch, via)
        self._transfer(self._flows.hand_over(source, target, role, via))

    def download(self, replicas: Sequence[int], epoch: int) -> None:
        """Send from the aggregation server to all replicas at the same time, over one uplink."""
        super().download(replicas, epoch)
        self._transfer(self._flows.download(replicas))

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Send from all replicas to the aggregation server at the same time, over one downlink."""
        super().upload(weights, epoch)
        self._transfer(self._flows.upload(weights))

    def _transfer(self, flows: Iterable[Flow]) -> None:
        for _, sender, receiver, size in flows:
            self.clock.transfer(sender, receiver, size)
        self.clock.barrier()


def _sizes(batches: Sequence[Tensor]) -> list[int]:
    """Return the batch sizes of all steps with rows; an empty step sends and computes nothing."""
    return [len(rows) for rows in batches if len(rows)]


def check_speeds(topology: Topology, speeds: Speeds | None) -> None:
    """Raise `InvalidInput` for a simulated clock of a run whose computation is not plain."""
    computation = topology.computation
    if speeds is not None and computation is not None:
        raise InvalidInput(
            f"speeds count arithmetic in plain, and {computation.refusals['speeds']}: leave one of them out; the "
            "seconds of a batch are estimated without"
        )


def clock_of(prepared: Prepared, speeds: Speeds) -> Clock:
    """Return a simulated clock at time zero for the parties of `prepared`, with these `speeds`."""
    check_speeds(prepared.topology, speeds)
    shape_of_topology: dict[int, StepShape] = {}
    shapes = {}
    for replica, (topology, facts) in enumerate(zip(prepared.topologies, prepared.facts, strict=True)):
        if id(topology) not in shape_of_topology:
            labels = labels_of(topology, prepared.data.clients[replica].train).values()
            size = max((y.element_size() * y[0].numel() for y in labels), default=0)
            shape_of_topology[id(topology)] = step_shape(topology, facts, segment_flops(topology, facts), size)
        shapes[replica] = shape_of_topology[id(topology)]
    others = [FED] if prepared.placement.averaged or prepared.placement.aggregation_server else []
    return Clock(shapes, speeds, party_names(prepared.topology, len(prepared.topologies)), others)


def count_rounds(prepared: Prepared, rounds: int, clock: Clock | None = None) -> CountingTrainer:
    """Play `rounds` rounds of `prepared`, moving `clock`; return the trainer with the counts."""
    counting = CountingTrainer(prepared)
    for _ in simulate_rounds(counting, prepared, rounds, clock):
        pass
    return counting


def simulate_rounds(
    counting: CountingTrainer, prepared: Prepared, rounds: int, clock: Clock | None = None
) -> Iterator[int]:
    """Play `rounds` rounds of `prepared` over `counting`, moving `clock`; yield the number of each after it ends."""
    method = prepared.method
    learners: Sequence[Learner] = [CountingLearner(counting, replica) for replica in range(counting.replicas)]
    method_clock = None if clock is None or method is None else MethodClock(clock, counting.traffic, learners)
    learners = learners if method_clock is None else method_clock.learners
    trainer: Trainer = counting if method is None else MethodTrainer(counting, method, learners)
    if clock is not None:
        trainer = TimedTrainer(trainer, clock, prepared.topologies, prepared.placement, method_clock)
    state = prepared.schedule.start(counting.replicas)
    method_state = {} if method is None else start_state(method, prepared.topologies[0], counting.replicas)
    for number in range(rounds):
        if method is not None:
            with nullcontext() if method_clock is None else method_clock.advance_clock():
                query(method, learners, prepared.schedule, counting, prepared.training, number, method_state)
        finished_round = prepared.schedule.round(trainer, prepared.training, number, state)
        if method is not None:
            with nullcontext() if method_clock is None else method_clock.advance_clock():
                aggregate(method, learners, prepared.schedule, counting, finished_round, number, method_state)
        yield number
