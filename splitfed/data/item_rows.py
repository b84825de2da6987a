"""Rows of a map-style data set, read by number when needed, and collation of lists of x into tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, describe_error, others_code
from splitfed.core.rows import Draw, RowSource
from splitfed.data.conversion import as_rows, as_tensor, join_parts
from splitfed.data.features import Feature

Collate: TypeAlias = Callable[[Sequence[Any]], Any]
"""Function from a list of x to rows (n, ...), or name -> (n, ...)."""


class ItemRows(RowSource):
    """The x of the items (x, y) of a map-style `dataset`, as `dtype`; items are not kept in memory.

    `collate`: makes rows from a list of x of several shapes; None: they are stacked. `features`: positions of the parts
    of x that are mappings. `name`: the prefix of errors.
    """

    def __init__(self, name: str, dataset: Any, dtype: str, collate: Collate | None = None) -> None:
        self._name, self._dataset, self._kind, self._collate = name, dataset, dtype, collate
        first, self.features = self._make([item_of(name, dataset, 0)[0]], [0])
        self.shape, self.dtype = tuple(first.shape[1:]), first.dtype
        self.extremes = first.new_empty(0)

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the x of the items of these numbers, read from the data set."""
        if len(rows) == 0:
            return torch.empty(0, *self.shape, dtype=self.dtype)
        numbers = rows.tolist()
        found, _ = self._make([item_of(self._name, self._dataset, i)[0] for i in numbers], numbers)
        if tuple(found.shape) != (len(rows), *self.shape):
            raise InvalidInput(
                f"{self._name}: items {numbers[0]} to {numbers[-1]} make {tuple(found.shape)}; expected "
                f"{(len(rows), *self.shape)} as of item 0: collate must give every row one shape, as PadSequences does"
            )
        return found

    def labels(self) -> Tensor:
        """Return the y of all items, each read once: (n,) or (n, targets).

        For images, `extremes` then holds the values by which `pixel_range` determines the range of all.
        """
        column: Column | None = None
        for i in range(len(self)):
            x, given = item_of(self._name, self._dataset, i)
            y = as_tensor(f"{self._name}: y of item {i}", given, share=True)
            if len(self.shape) == 3 and self.dtype == torch.float32:
                self._note(self._make([x], [i])[0])
            column = Column(len(self), y) if column is None else column
            column.put(f"{self._name}: y", i, y)
        assert column is not None
        return column.rows

    def _note(self, row: Tensor) -> None:
        """Keep the smallest and the largest number so far, and one fraction, if there is any."""
        fractions = row[row != row.round()][:1]
        found = torch.cat([self.extremes, torch.stack(row.aminmax()), fractions])
        kept = found[found != found.round()][:1]
        self.extremes = torch.cat([torch.stack(found.aminmax()), kept])

    def _make(self, xs: list[Any], numbers: Sequence[int]) -> tuple[Tensor, dict[str, Feature]]:
        """Return the rows of `xs`, and the positions of their parts; `numbers` of the items, for errors."""
        name = self._name
        if self._collate is not None:
            joined = self._collate(xs)
        elif isinstance(xs[0], Mapping):
            if other := next((i for i, x in zip(numbers, xs, strict=True) if list(x) != list(xs[0])), None):
                raise InvalidInput(f"{name}: x of item {other} has other parts than that of item {numbers[0]}")
            joined = {part: self._stack(f"x[{part!r}]", [x[part] for x in xs], numbers) for part in xs[0]}
        else:
            joined = self._stack("x", xs, numbers)
        if isinstance(joined, Mapping):
            return join_parts(name, joined, self._kind)
        return as_rows(f"{name}: x", joined, self._kind), {}

    def _stack(self, what: str, values: list[Any], numbers: Sequence[int]) -> Tensor:
        column: Column | None = None
        for place, (i, value) in enumerate(zip(numbers, values, strict=True)):
            tensor = as_tensor(f"{self._name}: {what} of item {i}", value, share=True)
            column = Column(len(values), tensor, first=numbers[0]) if column is None else column
            column.put(f"{self._name}: {what}", i, tensor, place)
        assert column is not None
        return column.rows


class Column:
    """Values of one shape for `count` items, collected into one tensor.

    `dtype`: of the tensor (None: the smallest that fits all). `first`: the number of the item that `like` belongs to.
    """

    def __init__(self, count: int, like: Tensor, dtype: torch.dtype | None = None, first: int = 0) -> None:
        self.rows = torch.empty(count, *like.shape, dtype=like.dtype if dtype is None else dtype)
        self._promotes, self._first = dtype is None, first

    def put(self, what: str, i: int, value: Tensor, place: int | None = None) -> None:
        """Store the value of item `i` at `place` (None: i); raise `InvalidInput` for another shape than the first's."""
        if value.shape != self.rows.shape[1:]:
            raise InvalidInput(
                f"{what} of item {i} has shape {tuple(value.shape)}; "
                f"expected {tuple(self.rows.shape[1:])} as in item {self._first}"
            )
        if self._promotes and value.dtype != self.rows.dtype:
            self.rows = self.rows.to(torch.promote_types(self.rows.dtype, value.dtype))
        self.rows[i if place is None else place] = value


def item_of(name: str, dataset: Any, i: int) -> tuple[Any, Any]:
    """Return x and y of item `i`; raise `InvalidInput` for an item that is no pair."""
    with others_code(lambda error: InvalidInput(f"{name}: dataset[{i}] raised {describe_error(error)}")):
        item = dataset[i]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise InvalidInput(f"{name}: item {i} is a {type(item).__name__}; expected a pair (x, y)")
    return item[0], item[1]


@dataclass(frozen=True)
class PadSequences:
    """A `collate` for sequences (steps, ...) of several lengths: the first `length` steps of each, padded with `value`.

    It returns (rows, length, ...).
    """

    length: int
    value: float = 0

    def __post_init__(self) -> None:
        check_count("PadSequences length", self.length, low=1)

    def __call__(self, xs: Sequence[Any]) -> Tensor:
        """Return the sequences `xs` as rows of one length: (rows, length, ...)."""
        tensors = [as_tensor("a sequence", x) for x in xs]
        if any(tensor.dim() == 0 or tensor.shape[1:] != tensors[0].shape[1:] for tensor in tensors):
            raise InvalidInput(
                f"PadSequences got shapes {sorted({tuple(t.shape) for t in tensors})}; expected (steps, ...) that "
                "differ only in the number of steps"
            )
        if not tensors[0].is_floating_point() and self.value != int(self.value):
            raise InvalidInput(f"PadSequences value={self.value} is not allowed; the sequences hold whole numbers")
        found = torch.full((len(xs), self.length, *tensors[0].shape[1:]), self.value, dtype=tensors[0].dtype)
        for row, tensor in zip(found, tensors, strict=True):
            row[: len(tensor)] = tensor[: self.length]
        return found
