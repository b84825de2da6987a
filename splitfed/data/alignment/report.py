"""Result of an alignment: rows in a common order, and a report of what was kept, left out and sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from splitfed.data.alignment.keys import AlignmentMessage, Key
from splitfed.data.dataset import Dataset


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
