"""What a run is, apart from the questions put to it: its parties, data and method, its history and its costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitfed.core.argument_kinds import guard_class
from splitfed.core.errors import InvalidInput
from splitfed.costs.clock import Clock
from splitfed.data.dataset import Federation
from splitfed.engines.base import Source
from splitfed.engines.engine import Engine
from splitfed.engines.observers import AttackObserver
from splitfed.federated.base import Method
from splitfed.planning.private import counted_ledger
from splitfed.privacy.ledger import Ledger
from splitfed.schedules.base import Round, Schedule, State, Training
from splitfed.stats.utility import ConstantAnswer, constant_of
from splitfed.threats.evaluator import Evaluator
from splitfed.threats.knowledge import KnowledgeGrants
from splitfed.training.client_scores import find_first_reaching
from splitfed.training.folder import RunFolder
from splitfed.training.local_learner import LocalLearner
from splitfed.training.run_method import RunMethod


@guard_class
class RunState:
    """The parties of a run and the history of every round; what is scored, drawn, summarised and exported reads it."""

    def __init__(
        self,
        engine: Engine,
        data: Federation,
        schedule: Schedule,
        schedule_state: State,
        seed: int,
        folder: RunFolder | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.engine = engine
        self.data = data
        self.schedule = schedule
        self.schedule_state = schedule_state
        self.seed = seed
        self.folder = folder
        self.clock = clock
        self.history: list[dict[str, Any]] = []
        # What all planned rounds cost, where a callback may end the run before them.
        self.committed: Ledger | None = None
        self.delta: float | None = None
        self.evaluator = Evaluator(KnowledgeGrants(engine, data, seed, self.newest, schedule=schedule))
        self.crosswise = False
        self.follow(None)

    def follow(self, method: Method | None) -> None:
        """Take up a federated method, before the first round."""
        self._method = RunMethod(method, self.engine, self.clock)
        self.trainer = self._method.trainer
        self.evaluator.grants.method = method

    @property
    def method(self) -> Method | None:
        """The federated method; None where there is none."""
        return self._method.method

    @property
    def method_state(self) -> dict[str, Any]:
        """What the federated method keeps from round to round, by its own names."""
        return self._method.state

    @property
    def learners(self) -> tuple[LocalLearner, ...]:
        """The clients as a federated method sees them."""
        return self._method.learners

    def query(self, training: Training, number: int) -> None:
        """Let the method, if there is one, tell the clients of round `number` what they need."""
        self._method.query(self.schedule, training, number)

    def aggregate(self, done: Round, number: int) -> Round:
        """Let the method, if there is one, aggregate what the clients of round `number` have learnt; return the round.

        Its `averaged` is False where the method's quorum was missed.
        """
        return self._method.aggregate(done, number)

    @property
    def utility(self) -> float:
        """The task's own metric on the union of all clients' test rows, after the last round; that of the first head.

        What it is called stands in `run.history[-1]["test"]["metric"]`. Raises `InvalidInput` without test rows.
        """
        score = self.history[-1]["test"]["union"]
        if score is None:
            raise InvalidInput("the run has no test rows: keep some (test=0.2)")
        return float(score)

    @property
    def accuracy(self) -> float:
        """The `utility` of a task whose metric is accuracy, in [0, 1]; `InvalidInput` for every other task."""
        if (metric := self.history[-1]["test"]["metric"]) != "accuracy":
            raise InvalidInput(f"the run has no accuracy: its task is scored by {metric!r}; ask for run.utility")
        return self.utility

    @property
    def constant(self) -> ConstantAnswer | None:
        """What always giving one answer, the best by all clients' training labels, scores on the same test rows.

        The most frequent class, or the mean; None where the task has no such answer, or without test rows.
        """
        head = self.engine.topology.scored[0]
        assert head.task is not None
        train, test = ([getattr(c, part).label(head.target) for c in self.data.clients] for part in ("train", "test"))
        return constant_of(head.task, train, test)

    def rounds_to(self, target: float) -> int | None:
        """Return after how many rounds the union of the validation rows first scored `target` or better; None: never.

        A round that was not scored (`Evaluation.every`) does not count as having reached it.
        """
        found = find_first_reaching(self.history, target, self.data.task.higher_is_better)
        return None if found is None else int(found["round"]) + 1

    @property
    def stopped(self) -> str | None:
        """Why a callback has ended training before its planned rounds, in a line; None where none has."""
        return self.history[-1].get("stopped") if self.history else None

    @property
    def bytes(self) -> int:
        """Bytes that crossed in training: activations, gradients, labels, weights."""
        return self.engine.traffic.bytes("train")

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the training rounds, evaluation left out."""
        return float(sum(entry["seconds"] for entry in self.history))

    @property
    def ledger(self) -> Ledger:
        """What every private mechanism was used for so far, in training and scoring, and what that costs together.

        Where a callback may end training early it states all planned rounds, whatever was trained of them.
        """
        counted = counted_ledger(self.engine, self.schedule, self.method, self.delta)
        return counted if self.committed is None else replace(self.committed, replaced=counted.replaced)

    @property
    def epsilon(self) -> float | None:
        """What all that crosses costs together at the ledger's delta; None where some of it has no promise.

        `str(run.ledger)` says what is promised of which part, and what crosses beside it.
        """
        return self.ledger.epsilon

    @property
    def restart_optimizers(self) -> bool:
        """Whether every round began with optimizers that had forgotten their state."""
        return self.evaluator.grants.training is not None and self.evaluator.grants.training.restart_optimizers

    @property
    def starts(self) -> str:
        """From which weights clients started: "shared", "own", or "given" where each had a topology with its own.

        "shared" too where something else was asked for and all that clients hold is broadcast before they train.
        """
        training = self.evaluator.grants.training
        return "shared" if training is None or training.starts is None else training.starts

    @property
    def training_attacks(self) -> Mapping[str, AttackObserver]:
        """What lived inside the training, by party."""
        return self.engine.training_attacks

    def newest(self, client: int) -> Source:
        """Return what `client` would predict with now: whose weights, or the weights themselves."""
        by_method = self._method.newest(client)
        return self.schedule.newest(client, self.schedule_state) if by_method is None else by_method
