"""Checks of a label set, and label sets beside the main labels of a data set."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.task_checks import has_own_loss
from splitfed.core.tasks import Task
from splitfed.data.conversion import check_dense


@dataclass(frozen=True, eq=False)
class LabelSet:
    """A label set with its task; y: (n,) int64 classes, or (n,) or (n, targets) float32."""

    y: Tensor
    task: Task


def check_labels(name: str, y: Tensor, rows: int, task: Task) -> None:
    """Raise `InvalidInput` unless y has one label for each of `rows` rows, of a type and shape that `task` takes.

    `name`: the prefix of the error.
    """
    if y.device.type != "cpu":
        raise InvalidInput(f"{name}: y is on {y.device}; expected cpu, like x")
    check_dense(f"{name}: y", y)
    if y.dim() == 0 or len(y) != rows:
        raise InvalidInput(f"{name}: x has {rows} rows and y has shape {tuple(y.shape)}; expected a label a row")
    kinds = [torch.int64] if task.name in ("classification", "binary") else [torch.int64, torch.float32]
    if y.dtype not in kinds:
        given, *allowed = (str(kind).removeprefix("torch.") for kind in (y.dtype, *kinds))
        raise InvalidInput(f"{name}: y has type {given}; expected {' or '.join(allowed)} for {task.name}")
    width = math.prod(y.shape[1:])
    if task.name == "regression" and task.outputs not in (None, width) and not has_own_loss(task):
        raise InvalidInput(
            f"{name}: y has shape {tuple(y.shape)}, {width} targets a row, and the task outputs={task.outputs}; "
            f"expected as many: regression({width}), or y of shape ({rows}, {task.outputs})"
        )
    try:
        task.check(y)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None
