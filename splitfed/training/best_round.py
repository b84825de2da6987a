"""The model of the best round, kept while a run trains on: `Evaluation(keep="best")`.

Paper: Prechelt, "Early stopping - but when?", Neural Networks: Tricks of the Trade 1998, whose procedure it is to keep
the weights of the lowest validation error. Here the task's metric on the union of all clients' validation rows chooses;
of equal scores the first. Test rows are never looked at, so that their score of that round is none that was chosen by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.planning.validation import Prepared
from splitfed.training.client_scores import find_best_round
from splitfed.training.description import private_mechanisms
from splitfed.training.round_trainer import RoundTrainer
from splitfed.training.settings import Evaluation

History = list[dict[str, Any]]


class BestRound:
    """Which entry of `history` the run of `trainer` answers for, and the model of that round beside the newest one.

    A model is all that a prediction, an attack or the next round reads of the parties, the schedule and the method.
    Counters, recordings and the clock are those of the newest round, whatever the run answers with.
    """

    def __init__(self, trainer: RoundTrainer, history: History, evaluation: Evaluation) -> None:
        self._trainer, self._history, self._active = trainer, history, evaluation.keep == "best"
        task = trainer.engine.topology.scored[0].task
        self._higher_is_better = task is None or task.higher_is_better
        # None while the newest round is the best, or none was scored.
        self._best: Mapping[str, Any] | None = None
        # Of the newest round, while the run answers with an earlier one.
        self._aside: Mapping[str, Any] | None = None

    @property
    def entry(self) -> Mapping[str, Any]:
        """The entry of the round that the run answers with when training ends, the best or the last; {} of none."""
        best = find_best_round(self._history, self._higher_is_better) if self._active else None
        return best or (self._history[-1] if self._history else {})

    @property
    def rounds(self) -> int | None:
        """After how many rounds the model was chosen that the run answers with; None while that is the newest."""
        return None if self._aside is None else int(self.entry["round"]) + 1

    def check_score(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the round of `metrics` scores best so far; raise `InvalidInput` where none can be chosen."""
        if not self._active:
            return False
        others = [entry for entry in self._history if entry is not metrics]
        best = find_best_round([*others, metrics], self._higher_is_better)
        if best is None:
            told = metrics["validation"]
            raise InvalidInput(
                f'keep="best" chooses by the {told["metric"]} of validation rows, which is {told["union"]} after round '
                f"{metrics['round']}: give the task a metric that is a finite number on these rows, or leave keep out"
            )
        return best is metrics

    def hold(self) -> None:
        """Keep the model where it is the best so far, before the next round changes it."""
        if self._active and self._history and self.entry is self._history[-1]:
            self._best = self._trainer.model_state()

    def answer(self) -> None:
        """Put the best round's model in the place of the newest one."""
        if self._active and self._history and self._best is not None and self.entry is not self._history[-1]:
            self._aside = self._trainer.model_state()
            self._trainer.load_model_state(self._best)

    def go_on(self) -> None:
        """Put the newest round's model back."""
        if self._aside is not None:
            self._trainer.load_model_state(self._aside)
            self._aside = None

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Have the newest round's model in its place inside the block."""
        aside = self._aside is not None
        self.go_on()
        yield
        if aside:
            self.answer()

    def state(self) -> dict[str, Any]:
        """Return the best round's model for a checkpoint; nothing where it is the newest one."""
        earlier = self._best is not None and self.entry is not self._history[-1]
        return {"best": self._best} if earlier else {}

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Go back to `states`, as `state` returned them."""
        self._best, self._aside = states.get("best"), None


def check_keep(evaluation: Evaluation, prepared: Prepared, rounds: int) -> None:
    """Refuse to keep the best round of a run in which nothing can be chosen, or in which no promise allows it."""
    if not any(len(client.validation) for client in prepared.data.clients):
        raise InvalidInput(
            'keep="best" chooses a round by validation rows, and no client has one: keep some (validation=0.1)'
        )
    if rounds <= evaluation.every:
        raise InvalidInput(
            f'keep="best" has nothing to choose from: of {rounds} rounds the last alone is scored '
            f"(every={evaluation.every}); score more rounds, or leave keep out"
        )
    if mechanisms := private_mechanisms(prepared):
        raise InvalidInput(
            f'keep="best" chooses a round by the scores of validation rows, which no figure of {mechanisms[0]} counts: '
            "leave one of them out"
        )
