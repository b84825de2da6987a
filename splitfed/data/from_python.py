"""Data sets from arrays, tensors, or any torch data set in a program."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, describe_error, others_code, short, unknown
from splitfed.core.rows import Draw, RowSource
from splitfed.core.tasks import Task, binary, classification, regression
from splitfed.data.conversion import as_rows, as_tensor, as_type, join_parts
from splitfed.data.dataset import Dataset
from splitfed.data.features import Feature
from splitfed.data.item_rows import Collate, Column, ItemRows, item_of

_SPARSE = 10
"""Ratio of classes to classes that occur from which on a warning is given."""
CLASSES = 2**24
"""Largest number of classes; larger labels are taken for codes that were not numbered."""
TaskLike: TypeAlias = Task | Literal["classification", "binary", "regression"] | None
Array: TypeAlias = Tensor | np.ndarray
RowType: TypeAlias = Literal["float32", "int64"]
"""The types that rows may have: real numbers, or codes such as token ids."""


def from_arrays(
    x: Array | Mapping[str, Array],
    y: Array,
    *,
    task: TaskLike = None,
    name: str = "arrays",
    value_range: tuple[float, float] | None = None,
    domains: Array | None = None,
    dtype: RowType = "float32",
    columns: Sequence[str] = (),
) -> Dataset:
    """Return a data set of these rows, as `dtype`.

    x: (n, ...) numbers; (n,) is read as one column. If its type is `dtype` already and its memory contiguous, the
    memory is shared: do not write into it while the data set is used. A memory-mapped array (`numpy.memmap`) is read by
    batch, and each row is checked when it is read. Other types are converted once. A mapping, name -> (n, ...), gives
    the parts of a row, one an argument of the model: each is a feature of its name, and a row is the parts stacked, (n,
    parts, ...), or, if their shapes differ, flattened and joined, (n, total). dtype: "float32", or "int64" for codes
    such as token ids. y: (n,) or (n, 1) whole numbers, or (n,) or (n, targets) real ones, copied. Without a `task`,
    whole-number labels mean classification (of max + 1 classes) and real ones regression; "classification", "binary"
    and "regression" name one. domains: (n,) whole numbers. columns: names, each once, of the columns of rows (n,
    columns). Raises `InvalidInput`, also for fractions with "int64", and for parts that mix whole and real numbers.
    """
    features: dict[str, Feature] = {}
    inputs: Tensor | RowSource
    if isinstance(columns, str) or len(set(columns)) < len(columns):
        raise InvalidInput(f"{name}: columns={short(columns)} is not allowed; expected a list of names, each once")
    if isinstance(x, np.memmap):
        inputs = ArrayRows(f"{name}: x", x, dtype)
    elif isinstance(x, Mapping):
        inputs, features = join_parts(name, x, dtype)
    else:
        inputs = as_rows(f"{name}: x", x, dtype, share=True)
    return _told_range(labelled(name, inputs, y, task, value_range, domains, features, columns))


def labelled(
    name: str,
    x: Tensor | RowSource,
    y: Array,
    task: TaskLike,
    value_range: tuple[float, float] | None = None,
    domains: Array | None = None,
    features: Mapping[str, Feature] | None = None,
    columns: Sequence[str] = (),
) -> Dataset:
    """Return a data set of the rows `x`, unchanged, with copies of labels and domains read as in `from_arrays`.

    The value range of images in memory is that of `pixel_range` unless one is given.
    """
    labels = as_tensor(f"{name}: y", y)
    if value_range is None:
        value_range = pixel_range(x)
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.flatten()
    if labels.dim() == 0 or labels.numel() == 0:
        raise InvalidInput(f"{name}: y has shape {tuple(labels.shape)}; expected at least one label")
    _mention_layouts(name, x, labels, task)
    resolved_task = as_task(task, labels)
    if resolved_task.name in ("classification", "binary"):
        if labels.is_floating_point():
            resolved_task.check(labels)  # before the conversion rounds a label that is no whole number
        labels = labels.to(torch.int64)
    elif labels.is_floating_point() or resolved_task.name == "regression":
        labels = labels.to(torch.float32)
    places = None if domains is None else as_type(f"{name}: domains", as_tensor(f"{name}: domains", domains), "int64")
    return Dataset(name, x, labels, resolved_task, value_range, places, features, columns=columns)


def _mention_layouts(name: str, x: Tensor | RowSource, labels: Tensor, task: TaskLike) -> None:
    """Raise for one-hot labels of classes; warn if they mean regression, or if channels seem to come last."""
    shape = tuple(x.shape) if isinstance(x, Tensor) else (len(x), *x.shape)
    if labels.dim() == 2 and bool(((labels == 0) | (labels == 1)).all() & (labels.sum(1) == 1).all()):
        said = f"{name}: y has one-hot rows, (n, {labels.shape[1]}) with a single 1 each"
        wanted = task.name if isinstance(task, Task) else task
        if wanted in ("classification", "binary") or (wanted is None and not labels.is_floating_point()):
            raise InvalidInput(f"{said}; expected a class a row: give y.argmax(1)")
        if wanted is None:
            warnings.warn(f"{said}, which means regression; give y.argmax(1) for classes", UserWarning, stacklevel=4)
    if len(shape) == 4 and shape[3] in (1, 3) and min(shape[1:3]) >= 8 and max(shape[1:3]) <= 4 * min(shape[1:3]):
        said = f"{name}: x has shape {shape}, which is read as {shape[1]} channels of {shape[2]}x{shape[3]}"
        warnings.warn(f"{said}; where channels come last, give x.permute(0, 3, 1, 2)", UserWarning, stacklevel=4)


def _told_range(data: Dataset) -> Dataset:
    """Return `data`; warn, before anything is trained, of images whose reconstructions cannot be scored."""
    if data.unscaled:
        warnings.warn(
            f"{data.name} holds images that are read by index and have no known value range, so that reconstructions "
            "of them cannot be attacked or scored; give value_range=(0, 1), or the actual one",
            UserWarning,
            stacklevel=3,
        )
    return data


def pixel_range(x: Tensor | RowSource) -> tuple[float, float] | None:
    """Return the value range of images in memory; None for rows that are no images or not in memory.

    The first of (0, 1), (-1, 1), for whole numbers (0, 255), and the bounding integers, that contains all values.
    """
    if not isinstance(x, Tensor) or x.dim() != 4 or x.dtype != torch.float32 or not x.numel():
        return None
    low, high = (float(end) for end in x.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    if low >= -1 and high <= 1:
        return (0.0, 1.0) if low >= 0 else (-1.0, 1.0)
    if low >= 0 and high <= 255 and bool((x == x.round()).all()):
        return 0.0, 255.0
    return float(math.floor(low)), float(math.ceil(high))


def from_torch(
    dataset: Any,
    *,
    task: TaskLike = None,
    name: str = "torch",
    value_range: tuple[float, float] | None = None,
    dtype: RowType = "float32",
    in_memory: bool = True,
    labels: Array | None = None,
    collate: Collate | None = None,
) -> Dataset:
    """Return the (x, y) items of a map-style torch data set: all read once, or by index when needed.

    x and y of an item are tensors, arrays or numbers, of one shape each; a random transform is drawn once. x may be a
    mapping, name -> such a value. Task, labels, parts and `dtype` are read as in `from_arrays`.

    in_memory=False keeps only labels and reads the items of each batch from `dataset`: `labels` (n,) or (n, targets)
    save reading every item once for its y, and for the value range of images, which must then be given. An item's x
    must be the same each time it is read: use `Dataset.with_transform` for a random transform. `collate` makes one
    tensor (rows, ...) from a list of x of several shapes, such as `PadSequences(64)`; all batches get rows of one
    shape.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidInput(f"{name}: {type(dataset).__name__} has no length and no items by number; expected both")
    with others_code(lambda error: InvalidInput(f"{name}: the length of dataset raised {describe_error(error)}")):
        count = len(dataset)
    if count == 0:
        raise InvalidInput(f"{name}: the data set is empty; expected at least one item")
    if in_memory and labels is not None:
        raise InvalidInput(f"{name}: labels apply to items that are read by index; set in_memory=False too")
    if not in_memory or collate is not None:
        source = ItemRows(name, dataset, dtype, collate)
        y = source.labels() if labels is None else as_tensor(f"{name}: y", labels)
        if value_range is None and not in_memory:
            value_range = pixel_range(source.extremes.view(-1, 1, 1, 1))
        if in_memory:
            x = source.take(torch.arange(len(source)))
            return labelled(name, x, y, task, value_range, features=source.features)
        return _told_range(labelled(name, source, y, task, value_range, features=source.features))
    columns: dict[str, Column] = {}
    parts: list[str] | None = None
    for i in range(count):
        x, y = item_of(name, dataset, i)
        found = list(x) if isinstance(x, Mapping) else None
        if i and found != parts:
            raise InvalidInput(f"{name}: x of item {i} has parts {found}; expected {parts} as in item 0")
        parts = found
        values = {"x": x} if found is None else {f"x[{part!r}]": x[part] for part in found}
        for what, value in {**values, "y": y}.items():
            tensor = as_tensor(f"{name}: {what} of item {i}", value, share=True)
            if what not in columns:
                own = torch.float32 if what == "x" and dtype == "float32" else None
                columns[what] = Column(count, tensor, own)
            columns[what].put(f"{name}: {what}", i, tensor)
    *xs, y_rows = (column.rows for column in columns.values())
    rows = xs[0] if parts is None else dict(zip(parts, xs, strict=True))
    return from_arrays(rows, y_rows, task=task, name=name, value_range=value_range, dtype=dtype)


def as_task(task: TaskLike, labels: Tensor) -> Task:
    """Return the task given, or of that name, or inferred from `labels` (n, ...): see `from_arrays`.

    Warns of labels that are likely meant otherwise.
    """
    if isinstance(task, Task):
        return task
    kind = task or ("regression" if labels.is_floating_point() else "classification")
    match kind:
        case "classification":
            if (most := int(labels.max())) >= CLASSES:
                raise InvalidInput(f"label {most} of y implies more than {CLASSES} classes; number them from 0 on")
            found = classification(max(2, int(labels.max()) + 1))
        case "binary":
            found = binary()
        case "regression":
            found = regression(labels[0].numel())
        case _:
            raise unknown("task", task, ["classification", "binary", "regression"])
    _mention_numbering(labels, task, found)
    return found


def _mention_numbering(labels: Tensor, task: TaskLike, found: Task) -> None:
    """Warn how ambiguous labels were read: repeated whole numbers of a real type, and classes from 1 on."""
    if labels.dim() != 1:
        return
    kinds = len(labels.unique())
    if task is None and labels.is_floating_point() and 2 <= kinds <= len(labels) // 2:
        if not bool((labels == labels.round()).all()):
            return
        said = "y holds whole numbers of a real type, which means regression; set task='classification' or 'regression'"
    elif found.name == "classification" and kinds > 1 and int(labels.min()) >= 1:
        low, high = int(labels.min()), int(labels.max())
        said = f"labels are {low} to {high}, which makes {found.outputs} classes, of which {low} are empty: number "
        said += f"them from 0, or say task=splitfed.classification({found.outputs})"
    elif found.name == "classification" and task is None and (found.outputs or 0) > _SPARSE * max(kinds, 2):
        said = f"labels are 0 to {int(labels.max())}, which makes {found.outputs} classes, of which "
        said += f"{(found.outputs or 0) - kinds} are empty: number them from 0 on, or say task='classification'"
    else:
        return
    warnings.warn(said, UserWarning, stacklevel=2)


class ArrayRows(RowSource):
    """Rows of `array` (n, ...) as `dtype`, "float32" or "int64"; (n,) is read as one column.

    `pixels`: bytes are divided by 255, and images without a channel get one. `channels_last`: the rows of the array are
    (height, width, channels). `what`: the prefix of errors.
    """

    def __init__(
        self, what: str, array: np.ndarray, dtype: str, *, pixels: bool = False, channels_last: bool = False
    ) -> None:
        if array.dtype.kind not in "biuf":
            raise InvalidInput(f"{what} has type {array.dtype}; expected real numbers")
        if array.ndim == 0 or array.size == 0:
            raise InvalidInput(f"{what} has shape {array.shape}; expected (rows, ...) with at least one row")
        # As a plain array: results of operations on a memory map would be memory maps, although they are in memory.
        self._what, self._array, self._kind = what, np.asarray(array), dtype
        self._pixels, self._channels_last = pixels, channels_last
        first = self._convert(self._array[:1])
        self.shape, self.dtype = tuple(first.shape[1:]), first.dtype

    def __len__(self) -> int:
        return len(self._array)

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers, read from the array."""
        if len(rows) == 0:
            return torch.empty(0, *self.shape, dtype=self.dtype)
        return self._convert(self._array[rows.numpy()])

    def _convert(self, few: np.ndarray) -> Tensor:
        if self._channels_last:
            few = few.transpose(0, 3, 1, 2)
        if self._pixels:
            few = (few[:, None] if few.ndim == 3 else few).astype(np.float32) / 255
        return as_rows(self._what, few, self._kind, share=True)
