"""Alignment of the tables that several parties hold about the same records: an inner join on their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_kind, check_names
from splitfed.data.alignment.keys import AlignmentMessage, Intersect, Intersection, Key, in_clear, in_order
from splitfed.data.alignment.table import Table, contents, keys_of
from splitfed.data.dataset import Dataset
from splitfed.data.features import adjacent_features
from splitfed.data.from_python import RowType, TaskLike, as_task, from_arrays

Duplicates: TypeAlias = Literal["refuse", "first", "drop"]


def align(
    tables: Mapping[str, Table],
    labels: str,
    task: TaskLike = None,
    *,
    duplicates: Duplicates = "refuse",
    minimum: int = 1,
    intersect: Intersect = in_clear,
    name: str = "aligned",
    dtype: RowType = "float32",
) -> Alignment:
    """Return the records that all parties hold, in an order that does not depend on the order of any table.

    `labels`: the party that holds y; it may hold no x. `duplicates`: what to do with a key that occurs twice in a
    table: raise an error ("refuse"), keep its first row ("first": only this depends on the order of a table), or use
    none of its rows ("drop"). `minimum`: the smallest allowed number of common records. `intersect` computes the common
    keys: `in_clear` (rows sorted by key), `keyed_hash(secret)` (by hash) or `private_intersection` (by key); each
    documents what it reveals, and to whom. Keys are compared exactly, with case and accents. If no table has keys, rows
    are matched by position and keep their order. `dtype`: of all x, as in `from_arrays`.

    A row of the data set's x is the flattened rows of all parties, joined in the order of `tables`: (n, total), with a
    feature a party. Raises `InvalidInput`, which names the party, for tables that cannot be aligned.
    """
    if not isinstance(tables, Mapping):
        raise InvalidInput(f"tables is a {type(tables).__name__}; expected a mapping of party to table")
    check_count("minimum", minimum, low=1)
    check_names("duplicates", ("refuse", "first", "drop"), duplicates)
    xs, y, lengths = contents(tables, labels, dtype)
    # From all labels: how many classes there are must not depend on who else holds a record.
    learnt = as_task(task, y)
    keys = keys_of(tables, lengths)
    by_position = all(table.keys is None for table in tables.values())
    usable = {party: _usable_rows(party, mine, duplicates) for party, mine in keys.items()}
    offered = {party: [keys[party][i] for i in rows] for party, rows in usable.items()}
    _check_enough(offered, min(map(len, offered.values())), minimum)
    intersection = (in_order if by_position else intersect)(offered, labels)
    check_kind("what intersect returns", intersection, Intersection, "an Intersection")
    rows = {party: torch.tensor([mine[i] for i in intersection.positions[party]]) for party, mine in usable.items()}
    _check_enough(offered, len(rows[labels]), minimum)
    report = Report(
        {party: _counts(keys[party], usable[party], len(rows[party])) for party in keys}, intersection.crossings
    )
    x = torch.cat([part[rows[party]].flatten(1) for party, part in xs.items()], dim=1)
    found = from_arrays(x, y[rows[labels]], task=learnt, name=name, dtype=dtype).with_features(adjacent_features(xs))
    dataset = replace(found, label_holder=labels)
    common_keys = () if by_position else tuple(keys[labels][i] for i in rows[labels].tolist())
    return Alignment(dataset, common_keys, rows, report)


def _usable_rows(party: str, keys: list[Key], duplicates: Duplicates) -> list[int]:
    """Return the row numbers of `party` that take part, each with a different key."""
    counts = Counter(keys)
    if duplicates == "refuse" and len(counts) < len(keys):
        key = next(key for key in keys if counts[key] > 1)
        raise InvalidInput(
            f"party {party!r} has key {key!r} {counts[key]} times; expected once, or duplicates='first' or 'drop'"
        )
    if duplicates == "drop":
        return [i for i, key in enumerate(keys) if counts[key] == 1]
    first: dict[Key, int] = {}
    for i, key in enumerate(keys):
        first.setdefault(key, i)
    return list(first.values())


def _counts(keys: list[Key], usable: list[int], kept: int) -> Counts:
    repeated = sum(count > 1 for count in Counter(keys).values())
    return Counts(len(keys), repeated, len(keys) - len(usable), len(usable) - kept, kept)


def _check_enough(offered: Mapping[str, list[Key]], most: int, minimum: int) -> None:
    if most < minimum:
        sizes = ", ".join(f"{party!r} (with {len(mine)})" for party, mine in offered.items())
        raise InvalidInput(f"at most {most} keys are common to {sizes}; expected at least minimum={minimum}")


@dataclass(frozen=True)
class Counts:
    """Counts of one party's rows: `rows` = `left_out` + `unmatched` + `kept`.

    `repeated`: keys that occur in more than one row, and `left_out` the rows not used for that reason; `unmatched`:
    rows whose key some other party lacks.
    """

    rows: int
    repeated: int
    left_out: int
    unmatched: int
    kept: int


@dataclass(frozen=True)
class Report:
    """Counts by party, and every message of an alignment, in order. `str()` gives a table."""

    parties: Mapping[str, Counts]
    crossings: tuple[AlignmentMessage, ...]

    @property
    def messages(self) -> int:
        """Number of messages sent."""
        return len(self.crossings)

    @property
    def bytes(self) -> int:
        """Bytes of all messages."""
        return sum(crossing.size for crossing in self.crossings)

    def __str__(self) -> str:
        head = ("party", "rows", "repeated keys", "left out", "unmatched", "kept")
        lines = [
            head,
            *((p, *map(str, (c.rows, c.repeated, c.left_out, c.unmatched, c.kept))) for p, c in self.parties.items()),
        ]
        width, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        table = [
            "  ".join([party.ljust(width), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))])
            for party, *cells in lines
        ]
        return "\n".join([*table, f"{self.messages} messages, {self.bytes} bytes sent"])


@dataclass(frozen=True, eq=False)
class Alignment:
    """The common records of several parties.

    dataset: their rows, with a feature for each party that holds x. rows: party -> (n,) int64, the positions of these
    rows in its table. keys: the keys of these rows, known to the parties; empty if rows were matched by position.
    """

    dataset: Dataset
    keys: tuple[Key, ...]
    rows: Mapping[str, Tensor]
    report: Report

    def __repr__(self) -> str:
        return f"Alignment({len(self.dataset)} records of {', '.join(self.rows)})"
