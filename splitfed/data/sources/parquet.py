"""Parquet: a table of numbers; row groups are read when they are used, so that rows may exceed the memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, first_line
from splitfed.core.rows import Draw, RowSource
from splitfed.data.conversion import as_rows
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import RowType, TaskLike, labelled
from splitfed.data.sources.files import check_columns, existing_file

KEPT = 2**27
"""Largest total bytes of row groups kept in memory; the last one is kept whatever its size."""


def parquet(
    path: str | Path,
    target: str,
    task: TaskLike = None,
    drop: Sequence[str] = (),
    domain: str | None = None,
    dtype: RowType = "float32",
) -> Dataset:
    """Return the table in `path`: column `target` is y, `domain` the domains, `drop` is left out, the rest is x.

    x: (rows, columns) numbers, or (rows, k) if the only column holds lists of k numbers each. Text in the target or the
    domain becomes the numbers 0, 1, ... of its sorted values; other text is refused. Labels and domains are kept in
    memory. The file is read by row groups, of which 128 MiB stay in memory: batches are drawn from all of a client's
    rows, so that the groups of a larger file are read many times; `npy` reads single rows. Task, labels and `dtype` as
    in `from_arrays`. Raises `InvalidInput` that names the column, also for missing values.
    """
    source = existing_file(path)
    # pyarrow is slow to import and needed by this loader alone.
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(source)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidInput(f"{source} cannot be read as Parquet: {first_line(error)}") from None
    columns = list(file.schema_arrow.names)
    check_columns(source, columns, target, drop, domain)
    read = [name for name in columns if name not in (target, domain, *drop)]
    if not read:
        raise InvalidInput(f"{source} has no column but {target!r}; expected at least one to learn from")
    if file.metadata.num_rows == 0:
        raise InvalidInput(f"{source} has no rows; expected at least one")
    rows = ParquetRows(source, file, read, dtype)
    domains = None if domain is None else _codes(source, file, domain)
    names = read if rows.shape == (len(read),) and len(read) > 1 else ()
    return labelled(source.stem, rows, _codes(source, file, target), task, domains=domains, columns=names)


class ParquetRows(RowSource):
    """The `columns` of a Parquet `file`, opened from `source`, as `dtype`, read by row groups."""

    def __init__(self, source: Path, file: Any, columns: Sequence[str], dtype: str) -> None:
        self._source, self._file, self._columns, self._kind = source, file, list(columns), dtype
        counts = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        self._ends = torch.tensor(counts).cumsum(0)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        first = self._group(next(i for i, count in enumerate(counts) if count))
        self.shape, self.dtype = tuple(first.shape[1:]), first.dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers; row groups that are not in memory are read."""
        found = torch.empty(len(rows), *self.shape, dtype=self.dtype)
        groups = torch.searchsorted(self._ends, rows, right=True)
        for group in groups.unique().tolist():
            mine = (groups == group).nonzero().flatten()
            held = self._group(group)
            if held.shape[1:] != found.shape[1:]:
                raise InvalidInput(
                    f"{self._source}: rows of group {group} hold {tuple(held.shape[1:])} numbers; expected {self.shape}"
                )
            found[mine] = held[rows[mine] - (self._ends[group] - len(held))]
        return found

    def _group(self, number: int) -> Tensor:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        table = _read_columns(self._source, self._file, self._columns, number)
        read = [_numbers(self._source, name, table.column(name)) for name in self._columns]
        if len(read) > 1 and any(values.ndim > 1 for values in read):
            raise InvalidInput(f"{self._source} has a column of lists beside others; expected it alone")
        joined = read[0] if read[0].ndim > 1 else np.stack(read, 1)
        found = as_rows(f"{self._source}: x", joined, self._kind)
        while self._kept and found.nbytes + sum(held.nbytes for held in self._kept.values()) > KEPT:
            self._kept.popitem(last=False)
        self._kept[number] = found
        return found


def _read_columns(source: Path, file: Any, columns: list[str], group: int | None = None) -> Any:
    import pyarrow

    try:
        return file.read(columns=columns) if group is None else file.read_row_group(group, columns=columns)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidInput(f"{source} cannot be read as Parquet: {first_line(error)}") from None


def _numbers(source: Path, name: str, column: Any) -> np.ndarray:
    """Return a column of numbers, (rows,), or of lists of as many numbers each, (rows, k)."""
    import pyarrow.types as types

    column, where = column.combine_chunks(), f"{source}: column {name!r}"
    if column.null_count:
        raise InvalidInput(f"{where} has a missing value; expected a number in every row")
    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        values = column.flatten()
        if values.null_count or len(column) == 0 or len(values) % len(column):
            raise InvalidInput(f"{where} has lists of several lengths, or with missing values; expected one length")
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if lengths.min() != lengths.max() or lengths.min() == 0:
            raise InvalidInput(f"{where} has lists of {lengths.min()} to {lengths.max()} numbers; expected one length")
        return _check(where, values).reshape(len(column), -1)
    return _check(where, column)


def _check(where: str, values: Any) -> np.ndarray:
    import pyarrow.types as types

    kind = values.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise InvalidInput(f"{where} holds {kind}; expected numbers: drop it, or write its categories as numbers")
    found: np.ndarray = values.to_numpy(zero_copy_only=False)
    return found


def _codes(source: Path, file: Any, name: str) -> np.ndarray:
    """Return a column of labels or domains: numbers unchanged, text as the indices of its sorted values."""
    import pyarrow.types as types

    column = _read_columns(source, file, [name]).column(name)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_string(column.type) or types.is_large_string(column.type):
        if column.null_count:
            raise InvalidInput(f"{source}: column {name!r} has a missing value; expected text in every row")
        return np.unique(np.asarray(column.to_pylist()), return_inverse=True)[1]
    return _numbers(source, name, column)
