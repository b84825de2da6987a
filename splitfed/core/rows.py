"""Rows that are read by index: the contract, rows of a tensor, and some, several and checked rows of others.

Whoever trains asks for the rows of one batch, so a data set may be larger than the memory. A client's part is a list
of row numbers of a source that all parts share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput

AT_ONCE = 2**30
"""The most bytes of rows that are not in memory which may be read at once."""

BLOCK = 2**22
"""About how many bytes of rows a walk over all of them reads at a time."""


class Draw(NamedTuple):
    """Whose random numbers a transform draws: the seed of the run and the epoch; each row adds its number."""

    seed: int
    epoch: int


class RowSource(ABC):
    """Rows x of one shape, numbered from 0, of which some are read at a time.

    `shape`: of one row. `dtype`: float32 or int64. `resident`: whether all of them are in memory as they are returned,
    so that reading computes nothing. `draws`: whether `take` draws random numbers where it is told whose. `couples`:
    whether a row as training sees it then holds numbers of other rows too.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    resident: bool = False
    draws: bool = False
    couples: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Return how many rows there are."""

    @abstractmethod
    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers, (rows,) int64 on the CPU, in this order: (rows, *shape), memory of its own.

        `draw`: as a step of training sees them, where there is a transform; None: as they are.
        """

    def select(self, rows: Tensor) -> RowSource:
        """Return the rows of these numbers, in this order, as rows numbered from 0; nothing is read.

        `rows`: (rows,) int64, or a truth value for each row. Raises `InvalidInput` for others.
        """
        return SelectedRows(self, row_numbers("the source", rows, len(self)))


class TensorRows(RowSource):
    """Rows of a tensor (n, ...) in memory, which is shared and not copied; all, or those at `index` (rows,)."""

    resident = True

    def __init__(self, tensor: Tensor, index: Tensor | None = None) -> None:
        self.tensor, self.index = tensor, index
        self.shape, self.dtype = tuple(tensor.shape[1:]), tensor.dtype

    def __len__(self) -> int:
        return len(self.tensor if self.index is None else self.index)

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers."""
        # Of images this takes a third of the time of tensor[rows].
        return self.tensor.index_select(0, rows if self.index is None else self.index.index_select(0, rows))

    def select(self, rows: Tensor) -> TensorRows:
        """Return the rows of these numbers of the same tensor."""
        chosen = row_numbers("the source", rows, len(self))
        return TensorRows(self.tensor, chosen.clone() if self.index is None else self.index[chosen])


class SelectedRows(RowSource):
    """The rows of `source` at `index` (rows,), which stays where it is."""

    def __init__(self, source: RowSource, index: Tensor) -> None:
        self.source, self.index = source, index.clone()
        self.shape, self.dtype, self.draws, self.couples = source.shape, source.dtype, source.draws, source.couples

    def __len__(self) -> int:
        return len(self.index)

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers."""
        return self.source.take(self.index.index_select(0, rows), draw)

    def select(self, rows: Tensor) -> SelectedRows:
        """Return the rows of these numbers of the same source."""
        return SelectedRows(self.source, self.index[row_numbers("the source", rows, len(self))])


class JoinedRows(RowSource):
    """The rows of several sources, one after another."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self.sources = tuple(sources)
        self.shape, self.dtype = sources[0].shape, sources[0].dtype
        self.draws, self.couples = any(s.draws for s in sources), any(s.couples for s in sources)
        self.ends = torch.tensor([len(source) for source in sources]).cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers."""
        found = torch.empty(len(rows), *self.shape, dtype=self.dtype)
        owner = torch.searchsorted(self.ends, rows, right=True)
        for number, source in enumerate(self.sources):
            mine = (owner == number).nonzero().flatten()
            if len(mine):
                found[mine] = source.take(rows[mine] - (self.ends[number] - len(source)), draw)
        return found


class CheckedRows(RowSource):
    """The rows of `source`, each checked when it is read: shape, type, finite, and inside `value_range`.

    Rows in memory are checked once; to check others so would read all of them. What a transform returns may leave the
    range. `name` begins the error.
    """

    def __init__(self, name: str, source: RowSource, value_range: tuple[float, float] | None = None) -> None:
        self.name, self.source, self.value_range = name, source, value_range
        self.shape, self.dtype, self.draws, self.couples = source.shape, source.dtype, source.draws, source.couples

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers; raise `InvalidInput` that names the first bad one."""
        rows = row_numbers(self.name, rows, len(self))
        found = self.source.take(rows, draw)
        if tuple(found.shape) != (len(rows), *self.shape) or found.dtype != self.dtype:
            raise InvalidInput(
                f"{self.name}: {len(rows)} rows were read as {tuple(found.shape)} of {type_name(found.dtype)}; "
                f"expected {(len(rows), *self.shape)} of {type_name(self.dtype)}"
            )
        if found.is_floating_point():
            if (bad := first_bad(torch.isfinite(found))) is not None:
                raise InvalidInput(f"{self.name}: x is not finite in row {int(rows[bad])}, counted from 0")
            if self.value_range is not None and draw is None:
                low, high = self.value_range
                if (bad := first_bad((found >= low) & (found <= high))) is not None:
                    raise InvalidInput(
                        f"{self.name}: x leaves its value range [{low:g}, {high:g}] in row {int(rows[bad])}, counted "
                        "from 0"
                    )
        return found


def row_numbers(name: str, given: Any, count: int) -> Tensor:
    """Return row numbers, or a truth value for each of `count` rows, as row numbers (rows,) int64, each below `count`.

    Raises `InvalidInput`, which `name` begins, for others, numbers with fractions among them.
    """
    listed = isinstance(given, (list, tuple))
    chosen = torch.as_tensor(given)
    if chosen.dtype == torch.bool and tuple(chosen.shape) == (count,):
        return chosen.nonzero().flatten().cpu()
    truths = sum(isinstance(one, (bool, np.bool_)) for one in given) if listed else int(chosen.dtype == torch.bool)
    whole = not (truths or chosen.is_floating_point() or chosen.is_complex())
    if chosen.dim() != 1 or not (whole or chosen.numel() == 0):
        what = "truth values" if truths else type_name(chosen.dtype)
        raise InvalidInput(
            f"{name}: indices of rows have shape {tuple(chosen.shape)} and are {what}; expected (rows,) whole numbers, "
            f"or a truth value for each of {count} rows"
        )
    chosen = chosen.to("cpu", torch.int64)
    outside = (chosen < 0) | (chosen >= count)
    if bool(outside.any()):
        raise InvalidInput(f"{name} has no row {int(chosen[outside][0])}; expected 0 to {count - 1}")
    return chosen


def layers(rows: RowSource) -> Iterator[RowSource]:
    """Yield `rows` and what they are made of, from the outside in; of several, those that draw before others."""
    yield rows
    for source in sorted(_inner(rows), key=lambda one: not one.draws):
        yield from layers(source)


def in_memory(rows: RowSource) -> bool:
    """Return whether all that `rows` are made of is in memory, whatever a transform makes of it."""
    return all(one.resident for one in layers(rows) if not _inner(one))


def as_rows_by_index(x: Tensor | RowSource) -> RowSource:
    """Return `x` as rows that are read by index; a tensor is shared."""
    return x if isinstance(x, RowSource) else TensorRows(x)


def join_rows(parts: Sequence[RowSource]) -> RowSource:
    """Return the rows of `parts`, of one shape and type, one after another; nothing is read of what is not in memory.

    Those of one tensor, or of one source, stay row numbers of it.
    """
    tensors = [part for part in parts if isinstance(part, TensorRows)]
    if len(tensors) == len(parts):
        if all(part.tensor is tensors[0].tensor for part in tensors):
            return TensorRows(tensors[0].tensor, torch.cat([_numbers(part) for part in tensors]))
        return TensorRows(torch.cat([read_rows("x", part) for part in tensors]))
    chosen = [part for part in parts if isinstance(part, SelectedRows)]
    if len(chosen) == len(parts) and all(part.source is chosen[0].source for part in chosen):
        return SelectedRows(chosen[0].source, torch.cat([part.index for part in chosen]))
    return JoinedRows(parts)


def read_rows(name: str, x: Tensor | RowSource) -> Tensor:
    """Return all rows of `x` as one tensor (n, ...): that of the user where it is one.

    Raises `InvalidInput`, which `name` begins, where rows that are not in memory would take more than `AT_ONCE` bytes.
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, TensorRows) and x.index is None:
        return x.tensor
    if not in_memory(x) and (size := len(x) * row_bytes(x)) > AT_ONCE:
        raise InvalidInput(
            f"{name}: {len(x)} rows that are read by index take {size / 2**30:.1f} GiB at once; at most "
            f"{AT_ONCE / 2**30:g} GiB is allowed: set fewer aside (auxiliary=1000), or take some by rows(...)"
        )
    return x.take(torch.arange(len(x)))


def blocks(x: Tensor | RowSource, size: int | None = None) -> Iterator[Tensor]:
    """Yield all rows of `x` in order, `size` at a time (None: about `BLOCK` bytes of them)."""
    rows = as_rows_by_index(x)
    each = max(1, BLOCK // max(1, row_bytes(rows))) if size is None else size
    # A view of a user's tensor is read as it is.
    if isinstance(rows, TensorRows) and rows.index is None:
        yield from rows.tensor.split(each)
        return
    for start in range(0, len(rows), each):
        yield rows.take(torch.arange(start, min(start + each, len(rows))))


def row_bytes(rows: RowSource) -> int:
    """Return how many bytes one row takes."""
    return torch.Size(rows.shape).numel() * rows.dtype.itemsize


def first_bad(good: Tensor) -> int | None:
    """Return the first row of `good` (n, ...) that is not all true."""
    bad = ~good.flatten(1).all(1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type without that of torch."""
    return str(dtype).removeprefix("torch.")


def _inner(rows: RowSource) -> list[RowSource]:
    inner = getattr(rows, "sources", None) or [getattr(rows, "source", None)]
    return [one for one in inner if isinstance(one, RowSource)]


def _numbers(rows: TensorRows) -> Tensor:
    return torch.arange(len(rows)) if rows.index is None else rows.index


def flat_rows(z: Tensor) -> Tensor:
    """Return the numbers of each row side by side: (rows, ...) to (rows, numbers); one number a row is a row of one."""
    return z.unsqueeze(-1).flatten(1)
