"""Tables to align: what one party holds about its records, and the checks on all of them."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_kind, check_names
from splitfed.data.alignment.keys import Key
from splitfed.data.conversion import as_rows, as_tensor
from splitfed.data.from_python import RowType


@dataclass(frozen=True, eq=False)
class Table:
    """Table of one party: a row of x, a label, or both for each of its keys.

    keys: (n,) text or whole numbers (a list, an array, a column), or None for rows that all parties hold in the same
    order. x: (n, ...) real numbers; (n,) is read as one column. y: (n,) or (n, targets), as in `from_arrays`. `align`
    checks it, so that errors can name the party.
    """

    keys: Any = None
    x: Tensor | np.ndarray | None = None
    y: Tensor | np.ndarray | None = None


def contents(
    tables: Mapping[str, Table], labels: str, dtype: RowType
) -> tuple[dict[str, Tensor], Tensor, dict[str, int]]:
    """Return x (n, ...) as `dtype` of each party with x, y of the party `labels`, and the number of rows of all."""
    if len(tables) < 2:
        raise InvalidInput(f"tables of {list(tables)} are not enough to align; expected two parties or more")
    check_names("party with the labels", tables, labels)
    for party, table in tables.items():
        check_kind(f"tables[{party!r}]", table, Table, "splitfed.data.Table(keys, x, y)")
        if (table.y is not None) != (party == labels):
            raise InvalidInput(f"party {party!r} has {'no y' if party == labels else 'a y'}, and labels={labels!r}")
    xs = {party: _numbers(party, "x", table.x) for party, table in tables.items() if table.x is not None}
    y = _numbers(labels, "y", tables[labels].y)
    for party in tables:
        if party not in xs and party != labels:
            raise InvalidInput(f"party {party!r} has no x; only the party with the labels may lack one")
    if labels in xs and len(xs[labels]) != len(y):
        raise InvalidInput(f"party {labels!r} has {len(xs[labels])} rows of x and {len(y)} labels; expected as many")
    lengths = {party: len(xs.get(party, y)) for party in tables}
    return {party: as_rows(f"party {party!r}: x", x, dtype) for party, x in xs.items()}, y, lengths


def keys_of(tables: Mapping[str, Table], lengths: Mapping[str, int]) -> dict[str, list[Key]]:
    """Return the keys of every party, all of one type; if no table has keys, the row numbers of equally long tables."""
    without = [party for party, table in tables.items() if table.keys is None]
    if len(without) == len(tables):
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{party!r} has {length}" for party, length in lengths.items())
            raise InvalidInput(f"tables without keys differ in length: {sizes} rows; give keys to align them by")
        return {party: list(range(length)) for party, length in lengths.items()}
    if without:
        raise InvalidInput(f"party {without[0]!r} has no keys, others have; expected keys of all parties or of none")
    keys = {party: _keys(party, table.keys, lengths[party]) for party, table in tables.items()}
    kinds = {party: "text" if isinstance(mine[0], str) else "numbers" for party, mine in keys.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{party!r} has {kind}" for party, kind in kinds.items())
        raise InvalidInput(f"keys of two kinds never match: {listed}; expected one kind")
    return keys


def _numbers(party: str, what: str, value: Any) -> Tensor:
    tensor = as_tensor(f"party {party!r}: {what}", value)
    if tensor.dim() == 0 or tensor.numel() == 0:
        raise InvalidInput(f"party {party!r}: {what} has shape {tuple(tensor.shape)}; expected at least one row")
    return tensor


def _keys(party: str, keys: Any, count: int) -> list[Key]:
    if isinstance(keys, (str, bytes)):
        raise InvalidInput(f"keys of party {party!r} are one {type(keys).__name__}; expected a key a row")
    given = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    if len(given) != count:
        raise InvalidInput(f"party {party!r} has {len(given)} keys and {count} rows; expected a key a row")
    found = [_key(party, row, key) for row, key in enumerate(given)]
    if (other := next((key for key in found if type(key) is not type(found[0])), None)) is not None:
        raise InvalidInput(f"party {party!r} has keys {found[0]!r} and {other!r}; expected all text or all numbers")
    return found


def _key(party: str, row: int, key: object) -> Key:
    if isinstance(key, str):
        if any("\ud800" <= letter <= "\udfff" for letter in key):
            raise InvalidInput(f"party {party!r} has key {key!r} in row {row}; expected text that UTF-8 can write")
        return str(key)
    if isinstance(key, bool) or not isinstance(key, numbers.Integral):
        raise InvalidInput(
            f"party {party!r} has key {key!r} in row {row}, a {type(key).__name__}; expected text or a whole number"
        )
    return int(key)
