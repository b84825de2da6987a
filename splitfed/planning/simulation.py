"""Simulation of the rounds of a run, schedule and federated method, without computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from splitfed.costs.clock import Clock
from splitfed.engines.base import Trainer
from splitfed.federated.groups import start_state
from splitfed.federated.learner import Learner
from splitfed.planning.counting import CountingLearner, CountingTrainer
from splitfed.planning.method_clock import MethodClock
from splitfed.planning.rounds import MethodTrainer, aggregate, query
from splitfed.planning.timed import TimedTrainer
from splitfed.planning.validation import Prepared


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
                aggregate(method, learners, finished_round, number, method_state)
        yield number
