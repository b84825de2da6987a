"""Data sets made from what a program already holds: arrays, tensors, or any torch data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_names, unknown
from splitfed.core.tasks import Task, binary, classification, regression
from splitfed.data.dataset import Dataset
from splitfed.data.features import Feature, adjacent_features

TaskLike: TypeAlias = Task | Literal["classification", "binary", "regression"] | None
Array: TypeAlias = Tensor | np.ndarray
RowType: TypeAlias = Literal["float32", "int64"]
"""The types that rows may have: real numbers, or whole numbers that stand for things, such as token ids."""

_EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**24, torch.float64: 2**53}
"""Magnitude up to which every whole number is one of a type with fractions."""


def from_arrays(
    x: Array | Mapping[str, Array],
    y: Array,
    *,
    task: TaskLike = None,
    name: str = "arrays",
    value_range: tuple[float, float] | None = None,
    domains: Array | None = None,
    dtype: RowType = "float32",
) -> Dataset:
    """Return a data set with a copy of these rows, as `dtype`.

    x: (n, ...) numbers; (n,) is read as one column. A mapping, name -> (n, ...), gives the parts of a row, one an
    argument of the model: each is a feature of its name, and a row is the parts stacked, (n, parts, ...), or, where
    their shapes differ, flattened and side by side, (n, total). dtype: "float32", or "int64" for whole numbers that
    stand for things, such as token ids. y: (n,) or (n, 1) whole numbers, or (n,) or (n, targets) real ones. Without a
    `task`, whole-number labels mean classification (of max + 1 classes) and real ones regression; "classification",
    "binary" and "regression" name one. domains: (n,) whole numbers. Raises `InvalidInput`, for a number that is none
    of "int64" too, and for parts of which some are whole numbers and some real ones.
    """
    features: dict[str, Feature] = {}
    if isinstance(x, Mapping):
        inputs, features = _join_parts(name, x, dtype)
    else:
        inputs = as_rows(f"{name}: x", x, dtype)
    labels = as_tensor(f"{name}: y", y)
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
    return Dataset(name, inputs, labels, resolved_task, value_range, places, features)


def from_torch(
    dataset: Any,
    *,
    task: TaskLike = None,
    name: str = "torch",
    value_range: tuple[float, float] | None = None,
    dtype: RowType = "float32",
) -> Dataset:
    """Return all (x, y) items of a map-style torch data set, read once, in memory.

    x and y of an item are tensors, arrays or numbers, of one shape each; a transform that draws at random is
    drawn once. x may be a mapping, name -> such a value. Task, labels, parts and `dtype` are read as in `from_arrays`.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidInput(f"{name}: {type(dataset).__name__} has no length and no items by number; expected both")
    if len(dataset) == 0:
        raise InvalidInput(f"{name}: the data set is empty; expected at least one item")
    columns: dict[str, list[Tensor]] = {}
    parts: list[str] | None = None
    for i in range(len(dataset)):
        item = dataset[i]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise InvalidInput(f"{name}: item {i} is a {type(item).__name__}; expected a pair (x, y)")
        x, y = item
        found = list(x) if isinstance(x, Mapping) else None
        if i and found != parts:
            raise InvalidInput(f"{name}: x of item {i} has parts {found}; expected {parts} as in item 0")
        parts = found
        values = {"x": x} if found is None else {f"x[{part!r}]": x[part] for part in found}
        for what, value in {**values, "y": y}.items():
            tensor, column = as_tensor(f"{name}: {what} of item {i}", value), columns.setdefault(what, [])
            if column and tensor.shape != column[0].shape:
                raise InvalidInput(
                    f"{name}: {what} of item {i} has shape {tuple(tensor.shape)}; "
                    f"expected {tuple(column[0].shape)} as in item 0"
                )
            column.append(tensor)
    *xs, labels = (torch.stack(column) for column in columns.values())
    rows = xs[0] if parts is None else dict(zip(parts, xs, strict=True))
    return from_arrays(rows, labels, task=task, name=name, value_range=value_range, dtype=dtype)


def as_tensor(what: str, value: Any) -> Tensor:
    """Return numbers (a tensor, an array or one number) as a CPU tensor with memory of its own."""
    match value:
        case Tensor():
            tensor = value.detach().to("cpu", copy=True)
        case np.ndarray() | np.generic() | int() | float():
            array = np.array(value, order="C")
            if array.dtype.kind not in "biuf":
                raise InvalidInput(f"{what} has type {array.dtype}; expected real numbers")
            if array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63:
                raise InvalidInput(f"{what} holds {int(array.max())}; expected whole numbers below 2**63")
            # torch knows neither the other byte order nor long doubles, and few operations on unsigned types.
            reals = np.float32 if array.itemsize <= 4 else np.float64
            tensor = torch.from_numpy(array.astype(reals if array.dtype.kind == "f" else np.int64, copy=False))
        case _:
            raise InvalidInput(f"{what} is a {type(value).__name__}; expected a tensor, an array or a number")
    if tensor.is_complex():
        raise InvalidInput(f"{what} is complex; expected real numbers")
    if tensor.dtype == torch.uint64:
        return as_tensor(what, tensor.numpy())
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


def as_rows(what: str, value: Any, dtype: str) -> Tensor:
    """Return numbers as rows (n, ...) of `dtype`, see `as_type`; (n,) becomes one column."""
    tensor = as_type(what, as_tensor(what, value), dtype)
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def as_type(what: str, tensor: Tensor, dtype: str) -> Tensor:
    """Return `tensor`, as `as_tensor` returns it, as `dtype`: "float32" or "int64".

    Raises `InvalidInput` for real numbers that shall be "int64", and for a magnitude from which on the type that they
    come in leaves whole numbers out.
    """
    check_names("dtype of rows", ("float32", "int64"), dtype)
    if dtype == "float32":
        return tensor.to(torch.float32)
    if tensor.is_floating_point():
        bad = (tensor != tensor.round()) | (tensor.abs() > _EXACT[tensor.dtype])
        if bool(bad.any()):
            row, number = int(bad.nonzero()[0, 0]) if bad.dim() else 0, float(tensor[bad][0])
            raise InvalidInput(f"{what} holds {number:g} in row {row}; dtype='int64' expects whole numbers")
    return tensor.to(torch.int64)


def _join_parts(name: str, parts: Mapping[str, Array], dtype: str) -> tuple[Tensor, dict[str, Feature]]:
    """Return rows that hold `parts`, name -> (n, ...), and where in a flattened row each of them stands."""
    if not parts:
        raise InvalidInput(f"{name}: x has no part; expected name -> (n, ...), at least one")
    found = {part: as_tensor(f"{name}: {part!r}", value) for part, value in parts.items()}
    real = [part for part, value in found.items() if value.is_floating_point()]
    if real and len(real) < len(found):
        whole = next(part for part in found if part not in real)
        raise InvalidInput(
            f"{name}: {real[0]!r} holds real numbers and {whole!r} whole ones; all parts of a row have one type, as "
            f"float32 cannot tell whole numbers above {2**24} apart: convert one of them"
        )
    rows = {part: as_rows(f"{name}: {part!r}", value, dtype) for part, value in found.items()}
    counts = {part: len(value) if value.dim() else 0 for part, value in rows.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{part!r} has {count}" for part, count in counts.items())
        raise InvalidInput(f"{name}: {listed} rows; expected as many in every part")
    features = adjacent_features(rows)
    if len({feature.shape for feature in features.values()}) == 1:
        return torch.stack(list(rows.values()), 1), features
    return torch.cat([value.flatten(1) for value in rows.values()], 1), features


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
