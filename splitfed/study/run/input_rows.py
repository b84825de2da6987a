"""Reads rows to predict from a .npy, .npz or .csv file; nothing is ever unpickled."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, first_line
from splitfed.data import arrays
from splitfed.data.conversion import as_tensor, as_type
from splitfed.data.features import Feature
from splitfed.data.from_python import RowType
from splitfed.study.report.units import count_noun

KINDS = (".npy", ".npz", ".csv")


def read_rows(
    path: Path,
    shape: tuple[int, ...],
    value_range: tuple[float, float] | None = None,
    dtype: RowType = "float32",
    features: Mapping[str, Feature] | None = None,
    columns: Sequence[str] = (),
    categories: Mapping[str, Sequence[str]] | None = None,
    unread: Sequence[str] = (),
    separator: str = ",",
) -> Tensor:
    """Return the rows in `path` as (rows, *shape) of `dtype`, as the run's data has them.

    Arrays have that shape, or one row of it; a .npz file holds one array, one called x, or one for each of `features`,
    the parts of a row, (rows, ...). A CSV file holds numbers, a line a row, flattened, below a header or not; where the
    run's data have `columns`, a header names these, in any order, beside those that are `unread`, such as the target.
    Under a header a column of text stands once, as text, where its `categories` are known, or as 0/1 columns. Raises
    `InvalidInput` for what cannot be read, other columns, another shape, a value that is not finite, one outside
    `value_range`, and one that is no whole number where `dtype` is "int64".
    """
    check_kind(path)
    table = path.suffix.lower() == ".csv"
    if table:
        values = _read_csv(path, columns, categories or {}, unread, separator)
    else:
        values = _read_array(path, shape, features or {})
    x = as_type(repr(str(path)), as_tensor(repr(str(path)), values), dtype)
    width = math.prod(shape)
    if table and x.shape[1] == width:
        x = x.reshape(-1, *shape)
    if tuple(x.shape) == shape:
        x = x.unsqueeze(0)
    if x.dim() == 0 or tuple(x.shape[1:]) != shape:
        flat = f" ({width} numbers a line)" if table else ""
        raise InvalidInput(f"{str(path)!r} has shape {tuple(x.shape)}; this run takes rows of shape {shape}{flat}")
    if not len(x):
        raise InvalidInput(f"{str(path)!r} holds no row; expected at least one")
    _check_rows(path, "is not finite", torch.isfinite(x))
    if value_range is not None:
        low, high = value_range
        _check_rows(path, f"leaves the value range [{low:g}, {high:g}] of the run's data", (x >= low) & (x <= high))
    return x


def check_kind(path: Path) -> None:
    """Refuse a path that is no file, or one of a kind that `read_rows` does not know."""
    if not path.is_file():
        raise InvalidInput(f"{str(path)!r} is no file; expected rows as {', '.join(KINDS)}")
    if path.suffix.lower() not in KINDS:
        raise InvalidInput(f"{str(path)!r} is of no known kind; expected {', '.join(KINDS)}")


def _check_rows(path: Path, what: str, good: Tensor) -> None:
    if len(bad := (~good.flatten(1).all(1)).nonzero()):
        raise InvalidInput(f"{str(path)!r} {what} in row {int(bad[0])}, counted from 0")


def _read_array(path: Path, shape: tuple[int, ...], features: Mapping[str, Feature]) -> np.ndarray:
    try:
        # By its first bytes, whatever it is called.
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                file.seek(0)
                return arrays.read_array(file, path.stat().st_size)
        names = arrays.array_names(path)
        if features and "x" not in names and set(features) <= set(names):
            return _put_together(path, {part: arrays.read_member(path, part) for part in features}, shape, features)
        if "x" not in names and len(names) != 1:
            listed = ", ".join([*names[:10], *(["..."] if len(names) > 10 else [])]) or "none"
            raise InvalidInput(f"{str(path)!r} has no array 'x' (there is {listed}); expected x, or one array")
        return arrays.read_member(path, "x" if "x" in names else names[0])
    except InvalidInput:
        raise
    except arrays.MALFORMED as error:
        raise InvalidInput(f"{str(path)!r} cannot be read: {first_line(error)}") from None


def _put_together(
    path: Path, parts: Mapping[str, np.ndarray], shape: tuple[int, ...], features: Mapping[str, Feature]
) -> np.ndarray:
    """Return rows (rows, *shape) that hold `parts`, name -> (rows, ...), where the features of their names stand."""
    width, rows = math.prod(shape), len(np.atleast_1d(next(iter(parts.values()))))
    covered = np.unique(np.concatenate([feature.positions.numpy() for feature in features.values()]))
    if len(covered) < width:
        raise InvalidInput(f"{str(path)!r} has no array 'x', and {', '.join(features)} leave out some of a row")
    found = np.zeros((rows, width), np.result_type(*parts.values()))
    for part, values in parts.items():
        wanted = (rows, *features[part].shape)
        if values.shape != wanted:
            raise InvalidInput(f"{str(path)!r} has {part!r} of shape {values.shape}; expected {wanted}")
        found[:, features[part].positions.numpy()] = values.reshape(rows, -1)
    return found.reshape(rows, *shape)


def _read_csv(
    path: Path, columns: Sequence[str], categories: Mapping[str, Sequence[str]], unread: Sequence[str], separator: str
) -> np.ndarray:
    """Return the numbers of a CSV file, (rows, columns), in the order of `columns` where a header names these."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file, delimiter=separator, skipinitialspace=True) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"{str(path)!r} cannot be read as CSV: {error}") from None
    header = bool(lines) and any(_parse_number(field) is None for field in lines[0])
    rows = lines[1:] if header else lines
    if not rows:
        raise InvalidInput(f"{str(path)!r} holds no row; expected at least one")
    names = [name.strip() for name in lines[0]] if header and columns else []
    # Text stands in one column; where there are as many as values, these are 0 and 1 already.
    texts = {name: list(values) for name, values in categories.items() if names.count(name) == 1}
    width = len(names or rows[0])
    number_rows = []
    for i, line in enumerate(rows):
        where = f"row {i}, counted from 0"
        if len(line) != width:
            raise InvalidInput(f"{str(path)!r} has {len(line)} fields in {where}; expected {width} numbers")
        numbers: list[float] = []
        for name, field in zip(names or [""] * width, line, strict=True):
            values = texts.get(name, [])
            if name in unread and name not in columns:
                continue
            if field in values:
                numbers += [float(field == value) for value in values]
            elif len(values) > 1:
                known = ", ".join(map(repr, values[:20])) + (", ..." if len(values) > 20 else "")
                raise InvalidInput(f"{str(path)!r} has {field!r} in column {name!r}, {where}; expected {known}")
            elif (number := _parse_number(field)) is None:
                raise InvalidInput(f"{str(path)!r} has {field!r} in {where}; expected {width} numbers")
            else:
                numbers.append(number)
        number_rows.append(numbers)
    found = np.array(number_rows, dtype=np.float64)
    if not names:
        return found
    names = [name for name in names if name in columns or name not in unread]
    names = [name for name in names for _ in texts.get(name, [name])]
    if sorted(names) != sorted(columns):
        unlike = next(name for name in (*names, *columns) if names.count(name) != columns.count(name))
        has, wanted = (count_noun(found.count(unlike), "column") for found in (names, columns))
        shown = ", ".join(columns[:20]) + (", ..." if len(columns) > 20 else "")
        either = " either as it is, or" if categories else ""
        raise InvalidInput(
            f"{str(path)!r} has another header than the run's data: it has {has} called {unlike!r}, and the run's "
            f"data have {wanted}; expected the columns {shown} in any order, or no header. A column of text is given"
            f"{either} as a column of 0 and 1 for each of its values, sorted, all under its name"
        )
    # Columns of one name, which a column of text becomes, come in their own order.
    places = {name: [i for i, one in enumerate(names) if one == name] for name in names}
    return found[:, [places[name].pop(0) for name in columns]]


def _parse_number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        # As tables of the data have them, where they are read as 1 and 0.
        return {"true": 1.0, "false": 0.0}.get(field.strip().lower())
