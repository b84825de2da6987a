"""References for a test score: its interval over rows, and the score of a constant answer on the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitfed.core.tasks import Task
from splitfed.stats.intervals import metric_interval, share_interval

WILSON, BOOTSTRAP = "Wilson over rows", "bootstrap over rows"


class ConstantAnswer(NamedTuple):
    """The score of always giving the same answer, and the name of that answer."""

    score: float
    name: str


def over_rows(task: Task, output: Tensor, y: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """Return the 95 % interval of the task's metric over the rows of `output` (rows, ...) and `y` (rows, ...).

    {low, high, rows, kind}: Wilson's interval of an accuracy, a percentile bootstrap of any other metric; low and high
    are None if there is no interval. It covers other rows under the same trained model, not other trainings.
    """
    rows, value = len(y), float(task.metric(output, y))
    right = round(value * rows) if math.isfinite(value) else -1
    # Only a share of rows has Wilson's interval; a balanced accuracy of the user's own has not.
    if task.metric_name == "accuracy" and 0 <= right <= rows and abs(value * rows - right) < 1e-6 * rows:
        interval, kind = share_interval(right, rows), WILSON
    else:
        interval, kind = metric_interval(task.metric, output, y, generator), BOOTSTRAP
    low, high = (interval.low, interval.high) if interval.known else (None, None)
    return {"low": low, "high": high, "rows": rows, "kind": kind}


def constant_of(task: Task, train: Sequence[Tensor], test: Sequence[Tensor]) -> ConstantAnswer | None:
    """Return the score on `test` of the constant answer chosen by the labels `train`, both (rows, ...) a client.

    None if the task has no such answer, or there are no such rows.
    """
    seen, asked = (torch.cat([y.cpu() for y in part]) if part else torch.zeros(0) for part in (train, test))
    if task.constant is None or not len(seen) or not len(asked):
        return None
    return ConstantAnswer(float(task.metric(task.constant(seen, len(asked)), asked)), task.constant_name)


def below_constant(metric: str, value: float, constant: ConstantAnswer, higher_is_better: bool = True) -> str | None:
    """Return a clause stating that `value` is no better than the constant answer's score; None if it is better."""
    if value > constant.score if higher_is_better else value < constant.score:
        return None
    place = "no more than" if value == constant.score else "below" if higher_is_better else "above"
    return f"{metric} {value:.3g} is {place} {constant.score:.3g} of {constant.name}"
