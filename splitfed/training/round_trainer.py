"""Trains the rounds of a run, one by one: its schedule, with its federated method around each round of it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from splitfed.core.defense import privacy_event
from splitfed.core.errors import check_names
from splitfed.core.random import derive, stream
from splitfed.costs.speeds import Speeds
from splitfed.engines.base import Source, Trainer
from splitfed.engines.engine import Engine
from splitfed.federated.groups import newest, start_state
from splitfed.planning.method_clock import MethodClock
from splitfed.planning.rounds import MethodTrainer, aggregate, query
from splitfed.planning.simulation import TimedTrainer, clock_of
from splitfed.planning.validation import Prepared
from splitfed.schedules.base import Round, State
from splitfed.training.local_learner import LocalLearner


class RoundTrainer:
    """Trains `prepared` on the parties of `engine`; `speeds`: those of a simulated clock beside it, None for no clock.

    `learners`: the clients as a federated method sees them. `schedule_state` and `method_state`: what schedule and
    method keep from round to round, by their own names.
    """

    def __init__(self, engine: Engine, prepared: Prepared, speeds: Speeds | None) -> None:
        clock = None if speeds is None else clock_of(prepared, speeds)
        self.engine, self.prepared, self.clock = engine, prepared, clock
        method = prepared.method
        self.schedule_state: State = prepared.schedule.start(engine.replicas)
        self.method_state: dict[str, Any] = (
            {} if method is None else start_state(method, engine.topology, engine.replicas)
        )
        # One for the whole run each: they know what they have sent in a round.
        self.learners = tuple(LocalLearner(engine, replica) for replica in range(engine.replicas))
        # Of the client asked about last: what the method says it would use now.
        self._served: tuple[int, Mapping[str, Tensor] | None] | None = None
        self._method_clock = (
            None if clock is None or method is None else MethodClock(clock, engine.traffic, self.learners)
        )
        # As the method trains them: their steps noted where a clock is to know them.
        self._timed = self.learners if self._method_clock is None else self._method_clock.learners
        self._trainer: Trainer = engine if method is None else MethodTrainer(engine, method, self._timed)
        if clock is not None:
            placement = engine.run_parties.placement
            self._trainer = TimedTrainer(self._trainer, clock, engine.topologies, placement, self._method_clock)

    def train(self, number: int) -> dict[str, Any]:
        """Train round `number`; return what it did, before anything is scored. Epsilon is filled in later."""
        engine, training = self.engine, self.prepared.training
        started = time.perf_counter()
        if training.restart_optimizers:
            engine.restart_optimizers()
        # Passes forward draw from streams of parties; backward, a loss or an optimizer draws from the default ones.
        with stream(derive(training.seed, "round", number), engine.device, everywhere=True):
            done = self._train_round(number)
        self._served = None
        engine.end_round()
        metrics: dict[str, Any] = {
            "round": number,
            "loss": _mean(done.losses),
            "steps": len(done.losses),
            "clients": len(done.clients),
            "dropped": list(done.dropped),
            "averaged": done.averaged,
            "seconds": time.perf_counter() - started,
            "bytes": engine.traffic.bytes(),
            "messages": engine.traffic.messages(),
        }
        if any(privacy_event(d) is not None for d in engine.defenses):
            metrics["epsilon"] = None
        if self.clock is not None:
            metrics["simulated_seconds"] = self.clock.now
        if engine.training_attacks:
            metrics["training_attacks"] = {name: attack.metrics() for name, attack in engine.training_attacks.items()}
        if engine.detectors:
            metrics["detectors"] = {name: detector.metrics() for name, detector in engine.detectors.items()}
        return metrics

    def _train_round(self, number: int) -> Round:
        """Let the method, if there is one, tell the clients what they need, and aggregate what they have learnt.

        The round's `averaged` is False where the method's quorum was missed.
        """
        method, schedule, training = self.prepared.method, self.prepared.schedule, self.prepared.training
        if method is None:
            return schedule.round(self._trainer, training, number, self.schedule_state)
        timed = nullcontext if self._method_clock is None else self._method_clock.advance_clock
        with timed():
            query(method, self._timed, schedule, self.engine, training, number, self.method_state)
        done = schedule.round(self._trainer, training, number, self.schedule_state)
        with timed():
            return aggregate(method, self._timed, schedule, self.engine, done, number, self.method_state)

    def newest(self, client: int) -> Source:
        """Return what `client` would predict with now: whose weights, or the weights themselves."""
        method = self.prepared.method
        if self._served is None or self._served[0] != client:
            by_method = None if method is None else newest(method, LocalLearner(self.engine, client), self.method_state)
            self._served = client, by_method
        by_method = self._served[1]
        return self.prepared.schedule.newest(client, self.schedule_state) if by_method is None else by_method

    def state(self, callbacks: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole state by name: every party, recorder and counter, clock, method, schedule, `callbacks`."""
        engine = self.engine.state()
        parties: dict[str, Any] = {f"party-{name}": state for name, state in engine.pop("parties").items()}
        clock = {} if self.clock is None else {"clock": self.clock.state()}
        method = {} if self.prepared.method is None else {"method": self.method_state}
        told = {"callbacks": callbacks} if callbacks else {}
        return {**parties, "run": {**engine, **clock, **method, **told, "schedule": self.schedule_state}}

    def load_state(self, states: Mapping[str, Any]) -> Mapping[str, Any]:
        """Go back to `states`, as `state` returned them; return those of the callbacks."""
        check_names("state", states, "run")
        shared = dict(states["run"])
        callbacks: Mapping[str, Any] = shared.pop("callbacks", {})
        self._served, self.schedule_state = None, shared.pop("schedule")
        if self.clock is not None:
            self.clock.load_state(shared.pop("clock"))
        if self.prepared.method is not None:
            self.method_state = shared.pop("method")
        parties = {n.removeprefix("party-"): s for n, s in states.items() if n.startswith("party-")}
        self.engine.load_state({"parties": parties, **shared})
        return callbacks

    def model_state(self) -> dict[str, Any]:
        """Return copies of what makes the model of this round: parties, method, schedule, attacks inside training.

        Counters of steps and uses, recordings, traffic and the clock are not of it.
        """
        parties = {name: party.state.state_dict() for name, party in self.engine.run_parties.members().items()}
        for state in parties.values():
            del state["uses"]
        attacks = {name: attack.state() for name, attack in self.engine.training_attacks.items()}
        kept = {"method": self.method_state, "schedule": self.schedule_state}
        return copy.deepcopy({"parties": parties, "training_attacks": attacks, **kept})

    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """Go back to the model of `state`, as `model_state` returned it."""
        for name, party in self.engine.run_parties.members().items():
            party.state.load_state_dict({**state["parties"][name], "uses": party.state.uses.state()})
        for name, attack in self.engine.training_attacks.items():
            attack.load_state(state["training_attacks"][name])
        self.method_state, self.schedule_state = copy.deepcopy((state["method"], state["schedule"]))
        self._served = None


def _mean(losses: Sequence[float]) -> float | None:
    """Return the mean; None without losses, and where one is not finite, which only a step of dp_sgd survives."""
    return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None
