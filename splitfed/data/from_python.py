"""Data sets made from what a program already holds: arrays, tensors, or any torch data set."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.tasks import Task, binary, classification, regression
from splitfed.data.dataset import Dataset

TaskLike: TypeAlias = Task | Literal["classification", "binary", "regression"] | None


def from_arrays(
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    task: TaskLike = None,
    name: str = "arrays",
    value_range: tuple[float, float] | None = None,
    domains: Tensor | np.ndarray | None = None,
) -> Dataset:
    """Return a data set with a copy of these rows, as float32.

    x: (n, ...) numbers; (n,) is read as one column. y: (n,) or (n, 1) whole numbers, or (n,) or (n, targets)
    real ones. Without a `task`, whole-number labels mean classification (of max + 1 classes) and real ones
    regression; "classification", "binary" and "regression" name one. domains: (n,) whole numbers.
    """
    inputs, labels = as_tensor(f"{name}: x", x), as_tensor(f"{name}: y", y)
    if inputs.dim() == 1:
        inputs = inputs.unsqueeze(1)
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.flatten()
    if labels.numel() == 0:
        raise InvalidInput(f"{name}: y has shape {tuple(labels.shape)}; expected at least one label")
    resolved_task = as_task(task, labels)
    if resolved_task.name in ("classification", "binary"):
        if labels.is_floating_point():
            resolved_task.check(labels)  # before the conversion rounds a label that is no whole number
        labels = labels.to(torch.int64)
    elif labels.is_floating_point() or resolved_task.name == "regression":
        labels = labels.to(torch.float32)
    places = None if domains is None else as_tensor(f"{name}: domains", domains).to(torch.int64)
    return Dataset(name, inputs.to(torch.float32), labels, resolved_task, value_range, places)


def from_torch(
    dataset: Any,
    *,
    task: TaskLike = None,
    name: str = "torch",
    value_range: tuple[float, float] | None = None,
) -> Dataset:
    """Return all (x, y) items of a map-style torch data set, read once, in memory.

    x and y of an item are tensors, arrays or numbers, of one shape each; a transform that draws at random is
    drawn once. Task and labels are read as in `from_arrays`.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidInput(f"{name}: {type(dataset).__name__} has no length and no items by number; expected both")
    if len(dataset) == 0:
        raise InvalidInput(f"{name}: the data set is empty; expected at least one item")
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for i in range(len(dataset)):
        item = dataset[i]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise InvalidInput(f"{name}: item {i} is a {type(item).__name__}; expected a pair (x, y)")
        for part, value, values in (("x", item[0], xs), ("y", item[1], ys)):
            tensor = as_tensor(f"{name}: {part} of item {i}", value)
            if values and tensor.shape != values[0].shape:
                raise InvalidInput(
                    f"{name}: {part} of item {i} has shape {tuple(tensor.shape)}; "
                    f"expected {tuple(values[0].shape)} as in item 0"
                )
            values.append(tensor)
    return from_arrays(torch.stack(xs), torch.stack(ys), task=task, name=name, value_range=value_range)


def as_tensor(what: str, value: Any) -> Tensor:
    """Return numbers (a tensor, an array or one number) as a CPU tensor with memory of its own."""
    if isinstance(value, Tensor):
        tensor = value.detach().to("cpu", copy=True)
    elif isinstance(value, (np.ndarray, np.generic, int, float)):
        array = np.array(value, order="C")
        if array.dtype.kind not in "biuf":
            raise InvalidInput(f"{what} has type {array.dtype}; expected real numbers")
        # torch knows neither the other byte order nor long doubles, and few operations on unsigned types.
        reals = np.float32 if array.itemsize <= 4 else np.float64
        tensor = torch.from_numpy(array.astype(reals if array.dtype.kind == "f" else np.int64, copy=False))
    else:
        raise InvalidInput(f"{what} is a {type(value).__name__}; expected a tensor, an array or a number")
    if tensor.is_complex():
        raise InvalidInput(f"{what} is complex; expected real numbers")
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


def as_task(task: TaskLike, labels: Tensor) -> Task:
    """Return the task given, or called by that name, or that `labels` (n, ...) suggest: see `from_arrays`."""
    if isinstance(task, Task):
        return task
    if task is None:
        task = "regression" if labels.is_floating_point() else "classification"
    match task:
        case "classification":
            return classification(max(2, int(labels.max()) + 1))
        case "binary":
            return binary()
        case "regression":
            return regression(labels[0].numel())
    raise unknown("task", task, ["classification", "binary", "regression"])
