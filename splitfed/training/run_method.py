"""The federated method of a run: what it is told and aggregates in a round, its clients, its state, its predictions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from splitfed.costs.clock import Clock
from splitfed.engines.base import Trainer
from splitfed.engines.engine import Engine
from splitfed.federated.base import Method
from splitfed.federated.groups import newest, start_state
from splitfed.federated.learner import Learner
from splitfed.planning.method_clock import MethodClock
from splitfed.planning.rounds import MethodTrainer, aggregate, query
from splitfed.planning.timed import TimedTrainer
from splitfed.schedules.base import Round, Schedule, Training
from splitfed.training.local_learner import LocalLearner


class RunMethod:
    """A federated `method`, None for none, on the parties of `engine`; their time is counted where there is a `clock`.

    `learners`: the clients as the method sees them. `trainer`: what the schedule trains with.
    """

    def __init__(self, method: Method | None, engine: Engine, clock: Clock | None) -> None:
        self.method = method
        self.state: dict[str, Any] = {} if method is None else start_state(method, engine.topology, engine.replicas)
        # One for the whole run each: they know what they have sent in a round.
        self.learners = tuple(LocalLearner(engine, replica) for replica in range(engine.replicas))
        self._engine = engine
        # Of the client asked about last: what the method says it would use now.
        self._served: tuple[int, Mapping[str, Tensor] | None] | None = None
        self._clock = None if clock is None or method is None else MethodClock(clock, engine.traffic, self.learners)
        trainer: Trainer = engine
        if method is not None:
            trainer = MethodTrainer(trainer, method, self._timed_learners)
        if clock is not None:
            trainer = TimedTrainer(trainer, clock, engine.topologies, engine.run_parties.placement, self._clock)
        self.trainer = trainer

    @property
    def _timed_learners(self) -> tuple[Learner, ...]:
        """The clients, their steps noted where a clock is to know them."""
        return self.learners if self._clock is None else self._clock.learners

    def _measure_time(self) -> AbstractContextManager[None]:
        return nullcontext() if self._clock is None else self._clock.advance_clock()

    def query(self, schedule: Schedule, training: Training, number: int) -> None:
        """Let the method tell the clients of round `number` what they need."""
        self._served = None
        if self.method is not None:
            with self._measure_time():
                query(self.method, self._timed_learners, schedule, self._engine, training, number, self.state)

    def aggregate(self, done: Round, number: int) -> Round:
        """Let the method aggregate what the clients of round `number` have learnt; return the round.

        Its `averaged` is False where the method's quorum was missed.
        """
        self._served = None
        if self.method is not None:
            with self._measure_time():
                done = aggregate(self.method, self._timed_learners, done, number, self.state)
        return done

    def newest(self, client: int) -> Mapping[str, Tensor] | None:
        """Return the weights that `client` predicts with by the method; None where it leaves that to the schedule."""
        if self.method is None:
            return None
        if self._served is None or self._served[0] != client:
            self._served = client, newest(self.method, LocalLearner(self._engine, client), self.state)
        return self._served[1]

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to `state`."""
        self._served, self.state = None, state
