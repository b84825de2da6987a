"""How often each row went through each private mechanism of a party: the counts that a privacy ledger reads.

A key names the place and the row's owner: (edge, position of the defense, replica as messages carry it, part of the
data). What is done to labels has a name of its own in place of an edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from splitfed.core.defense import Defense, GradientDefense, LabelDefense, ReleaseDefense, privacy_event
from splitfed.core.privacy_events import Protects

if TYPE_CHECKING:
    from splitfed.core.tasks import Task

SCORED = ("validation", "test")
"""The parts of the data that are scored."""

PARTS = ("train", *SCORED)
"""The parts that are counted; rows that somebody lends to a party for a query are not the run's own."""

SHOWN = "shown by"
"""How the part begins under which rows are counted that are another client's; who has shown them follows."""

OWN = -1
"""In place of a replica: that of the party itself, which owns the rows."""

OTHERS = -2
"""In place of a replica: any other than the party's own."""

_REPLACED = "rows that were not finite"

Key = tuple[str, int, int, str]


class RowOrigins(NamedTuple):
    """Where the rows of a part come from, so that their uses are counted for the right ones.

    `owners`: (rows,) int64, `OWN` for a row of the party's own "train", else the client that has shown it, or `OTHERS`;
    `numbers`: (rows,) int64, which row of "train" it is, or which of those that its owner has shown.
    """

    owners: Tensor
    numbers: Tensor

    @classmethod
    def own(cls, numbers: Tensor) -> RowOrigins:
        """Return the origins of rows that are all of the party's own "train"."""
        return cls(torch.full_like(numbers, OWN), numbers)

    @classmethod
    def shown(cls, client: int, rows: int) -> RowOrigins:
        """Return the origins of all `rows` rows that `client` has shown."""
        return cls(torch.full((rows,), client), torch.arange(rows))

    @classmethod
    def joined(cls, origins: Iterable[RowOrigins]) -> RowOrigins:
        """Return the origins of rows one after another."""
        owners, numbers = zip(*origins, strict=True)
        return cls(torch.cat(owners), torch.cat(numbers))

    def select(self, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts under which `rows` (row numbers) are counted, each with the row numbers there."""
        owners, numbers = self.owners[rows], self.numbers[rows]
        for owner in owners.unique().tolist():
            name = {OWN: "train", OTHERS: f"{SHOWN} others"}.get(owner, f"{SHOWN} client {owner}")
            yield name, numbers[owners == owner]


class UsageCounts:
    """Counts of one party: key -> (rows,) int32; a row that was never released counts zero.

    `replaced`: place -> how many rows a mechanism found there that were not finite, and took for zeros.
    """

    def __init__(self) -> None:
        self.counts: dict[Key, Tensor] = {}
        self.replaced: dict[str, int] = {}

    def add(self, key: Key, rows: Tensor, times: int = 1) -> None:
        """Count `times` uses for each of `rows` (row numbers; one that is there twice counts twice)."""
        if not (key[-1] in PARTS or key[-1].startswith(SHOWN)) or len(rows) == 0:
            return
        rows = rows.cpu()
        counts = self.counts.get(key)
        missing = int(rows.max()) + 1 - (0 if counts is None else len(counts))
        if counts is None or missing > 0:
            fresh = torch.zeros(missing, dtype=torch.int32)
            counts = self.counts[key] = fresh if counts is None else torch.cat([counts, fresh])
        counts.index_add_(0, rows, torch.full((len(rows),), times, dtype=torch.int32))

    def replace(self, place: str, rows: int) -> None:
        """Note that `rows` rows at `place` were not finite and counted as zeros."""
        if rows:
            self.replaced[place] = self.replaced.get(place, 0) + rows

    def merge(self, key: Key, rows: Tensor) -> None:
        """Add the counts `rows` (rows,) to those of `key`."""
        there = self.counts.get(key, rows[:0])
        longer, shorter = (rows, there) if len(rows) > len(there) else (there, rows)
        self.counts[key] = longer.clone()
        self.counts[key][: len(shorter)] += shorter

    def take(self, place: str, position: int, part: str, rows: int) -> None:
        """Count one use for each of the `rows` labels of `part`, changed once when their holder received them.

        `place`: see `labels_of_head`; `position`: of the defense among all of the run.
        """
        if part in PARTS:
            self.counts[place, position, OWN, part] = torch.ones(rows, dtype=torch.int32)

    def state(self) -> dict[str, Any]:
        """Return the counts as tensors and whole numbers by text."""
        counts = {"\t".join(map(str, key)): counts.clone() for key, counts in self.counts.items()}
        return {**counts, **{f"{_REPLACED}\t{place}": rows for place, rows in self.replaced.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.counts, self.replaced = {}, {}
        for text, counts in state.items():
            if text.startswith(f"{_REPLACED}\t"):
                self.replaced[text.partition("\t")[2]] = int(counts)
                continue
            edge, position, replica, part = text.split("\t")
            self.counts[edge, int(position), int(replica), part] = counts.clone()


def labels_of_head(head: str) -> str:
    """Return what stands in place of an edge for the labels of `head`."""
    return f"labels of {head}"


def counted_kinds(defense: Defense) -> frozenset[str]:
    """Return on which kinds of message one sending is one use of `defense`: none without a promise."""
    event = privacy_event(defense)
    if event is None or event.protects is Protects.WEIGHTS:
        return frozenset()
    kinds = {"activation": ReleaseDefense, "gradient": GradientDefense}
    return frozenset(kind for kind, capability in kinds.items() if isinstance(defense, capability))


def counted_labels(defense: Defense, task: Task | None) -> frozenset[str]:
    """Return how `defense` uses labels of `task`: "once" when they are taken, "step" at each step of their row."""
    if task is None or not isinstance(defense, LabelDefense) or privacy_event(defense) is None:
        return frozenset()
    y = torch.zeros(2, dtype=torch.float32 if task.name == "regression" else torch.int64)
    once = defense.relabel(y, task, torch.Generator().manual_seed(0)) is not y
    step = defense.targets(y, task, torch.Generator().manual_seed(0)) is not y
    return frozenset(name for name, acts in (("once", once), ("step", step)) if acts)
