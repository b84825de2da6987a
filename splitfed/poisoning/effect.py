"""Effect of a poisoning: accuracy and success rate, compared with the same run without it.

Paper: Gu, Dolan-Gavitt, Garg, "BadNets: identifying vulnerabilities in the machine learning model supply chain", 2017
(attack success rate).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from splitfed.core.argument_kinds import guarded
from splitfed.core.errors import InvalidInput, check_count
from splitfed.data.dataset import Federation


class EvaluatedRun(Protocol):
    """Interface of a run whose poisoning is evaluated."""

    @property
    def data(self) -> Federation:
        """The rows of all clients."""

    @property
    def accuracy(self) -> float:
        """The task's metric (accuracy in a classification) on test rows without triggers."""

    def predict(self, x: Tensor, client: int = 0) -> Tensor:
        """Return the model's output for x."""


class Trigger(Protocol):
    """A poisoning with a trigger at inference."""

    @property
    def target(self) -> int:
        """The class that triggered rows should be predicted as."""

    def trigger(self, x: Tensor, data: Federation) -> Tensor:
        """Return the rows x with the trigger."""


@dataclass(frozen=True)
class Effect:
    """Accuracy on clean test rows and success rate of the trigger (None without one), with and without poisoning."""

    accuracy: float
    baseline_accuracy: float
    success: float | None = None
    baseline_success: float | None = None


@guarded
def success_rate(run: EvaluatedRun, trigger: Trigger, client: int = 0) -> float:
    """Return the share, in [0, 1], of triggered test rows of other classes that `run` predicts as the target.

    They pass the segments of `client`. Raises `InvalidInput` if no test row is of another class.
    """
    rows = run.data.test_union()
    others = rows.rows((rows.y != trigger.target).nonzero().flatten())
    if len(others) == 0:
        raise InvalidInput(f"there are no test rows of a class other than {trigger.target}: keep some (test=0.2)")
    output = run.predict(trigger.trigger(others.x, run.data), client)
    predicted = output.argmax(1) if output.dim() == 2 and output.shape[1] > 1 else (output.flatten() > 0).long()
    return float((predicted == trigger.target).double().mean())


@guarded
def effect(run: EvaluatedRun, baseline: EvaluatedRun, trigger: Trigger | None = None, client: int = 0) -> Effect:
    """Return the effect of the poisoning of `run`, compared with `baseline`, the same run without it.

    `trigger`: also compute success rates.
    """
    check_count("client", client)
    if trigger is None:
        return Effect(run.accuracy, baseline.accuracy)
    rates = [success_rate(one, trigger, client) for one in (run, baseline)]
    return Effect(run.accuracy, baseline.accuracy, *rates)
