"""Rows by which it is tried out whether rows of a batch change each other: pairs of batches that differ in some rows.

Half of the rows of a batch, drawn anew for each pair, are others in its second half; nothing of the rest may differ. So
one pair tries all rows against all others. Of rows of the run, in batches as large as the largest of the run: some
beside others; copies of one row beside others, which fills whatever has a capacity, for some rows from the shortest to
the longest; of the shortest beside the longest, which changes a greatest length; and whole rows beside short ones,
which changes a least. Of made-up rows: floats of several magnitudes and both signs, since a
branch may ask for them, and whole numbers that go through all there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.random import derive, generator
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts

MADE_UP = 16
"""The rows of a batch of made-up rows."""

COPIED = 8
"""The rows of which a whole batch of copies is made."""

WALKS = 4
"""The most batches in which all whole numbers are gone through."""

_RANGES = ((0.0, 1.0), (0.0, 0.01), (0.0, 100.0), (-1.0, 1.0), (-100.0, 100.0))
"""Between which numbers made-up floats lie; in the first one every segment has to work."""


@dataclass(frozen=True, eq=False)
class TrialRows:
    """Rows (n, ...) by input and their labels by head, and how many of them a batch has, two or more.

    `spans`: of inputs of whole numbers, the least and the greatest that occurs. `real`: whether they are of the run.
    `evaluated`: how many rows pass at once in evaluation mode; 0 where nothing is promised of those.
    """

    inputs: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    batch: int
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    real: bool = True
    evaluated: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


@dataclass(eq=False)
class RowPair:
    """Values by name of two batches that differ in the rows where `changed`, (rows,) bool: some, all or none.

    `needed`: whether every segment has to work on them; `training`: in which mode they pass; `rows`: those of
    `TrialRows` that the first batch is of.
    """

    one: dict[str, Tensor]
    other: dict[str, Tensor]
    changed: Tensor
    needed: bool = False
    training: bool = True
    rows: Tensor | None = None


def draw_values(shape: Sequence[int], dtype: torch.dtype, *words: str, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return numbers between `low` and `high`, or zeros and ones of a type without fractions, drawn by `words`."""
    random = generator(derive(0, "made-up rows", *words))
    if dtype.is_floating_point:
        return (low + (high - low) * torch.rand(shape, generator=random, dtype=torch.float64)).to(dtype)
    return torch.randint(0, 2, tuple(shape), generator=random).to(dtype)


def draw_half(rows: int, *words: str | int) -> Tensor:
    """Return (rows,) bool, True for a random half of them, one at least; nothing is True of a single row."""
    order = torch.randperm(rows, generator=generator(derive(0, "changed rows", *words)))
    return order < rows // 2


def make_up_rows(topology: Topology, facts: TopologyFacts) -> TrialRows:
    """Return made-up rows of the shapes in `facts`, where those of a run are not at hand."""
    names = {n: (2 * MADE_UP, *facts.shapes[n]) for n in topology.inputs}
    return TrialRows({n: draw_values(s, facts.dtypes[n], "rows", n) for n, s in names.items()}, {}, MADE_UP, real=False)


def make_pairs(trial: TrialRows) -> list[RowPair]:
    """Return the pairs of batches to be tried, in this order: of the last ones no row is another, in either mode."""
    x, batch = trial.inputs, max(2, trial.batch)
    rows, others = _beside(len(trial), batch)
    pairs = [
        _pair(_take(x, rows), _take(x, others), "rows", needed=True, rows=rows if trial.real else None),
        _pair(_take(x, rows), _shorten(_take(x, others), trial.spans), "shortened"),
        *_copies(trial, batch, COPIED, training=True),
    ]
    if trial.evaluated > 1:
        one, other = (_take(x, some) for some in _beside(len(trial), trial.evaluated))
        pairs.append(_pair(one, other, "evaluated", training=False))
    pairs += _copies(trial, max(2, trial.evaluated or batch), COPIED if trial.evaluated else 0, training=False)
    pairs += _made_up_pairs(x, min(batch, MADE_UP))
    pairs += _walks(trial, batch)
    few = min(batch, MADE_UP)
    one, other = _take(x, rows[:few]), _take(x, others[:few])
    # Rows that change all are those by which it shows what is kept of a batch.
    modes = (False, True)
    pairs += [RowPair(dict(one), dict(other), torch.ones(few, dtype=torch.bool), training=mode) for mode in modes]
    pairs += [RowPair(dict(other), dict(other), torch.zeros(few, dtype=torch.bool), training=mode) for mode in modes]
    return pairs


def _beside(rows: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of a batch of `rows`, and of others than those, wherever there are any."""
    numbers = torch.arange(batch) % rows
    return numbers, (numbers + max(1, min(batch, rows // 2))) % rows


def _copies(trial: TrialRows, batch: int, count: int, *, training: bool) -> list[RowPair]:
    """Return pairs of copies of one row beside others: of the shortest beside the longest, and of `count` rows."""
    x, order = trial.inputs, _by_size(trial.inputs)
    long = order.flip(0)[torch.arange(batch) % len(order)]
    pairs = [
        _pair(_shorten(_take(x, order[:1].expand(batch)), trial.spans), _take(x, long), "copies", training=training)
    ]
    others = _take(x, _beside(len(trial), batch)[1])
    for number in range(min(count, len(order))):
        copied = order[number * len(order) // count].expand(batch)
        pairs.append(_pair(_take(x, copied), others, f"copies {number}", training=training))
    return pairs


def _pair(
    one: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    name: str,
    *,
    needed: bool = False,
    training: bool = True,
    rows: Tensor | None = None,
) -> RowPair:
    changed = draw_half(len(next(iter(one.values()))), name)
    other = {n: t.clone() for n, t in one.items()}
    for n, t in other.items():
        t[changed] = new[n][changed].to(t.dtype)
    return RowPair(dict(one), other, changed, needed, training, rows)


def _take(x: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: t.index_select(0, rows) for name, t in x.items()}


def _by_size(x: Mapping[str, Tensor]) -> Tensor:
    """Return the numbers of all rows, from that of the fewest and smallest numbers on."""
    sizes = torch.zeros(len(next(iter(x.values()))), dtype=torch.float64)
    for t in x.values():
        flat = t.reshape(len(t), -1)
        size = flat.double().norm(dim=1) if t.is_floating_point() else (flat != 0).double().sum(1)
        sizes += size / size.mean().clamp_min(1e-12)
    return torch.argsort(sizes, stable=True)


def _shorten(x: Mapping[str, Tensor], spans: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return rows of which all but the first quarter is padding: zeros, or if none occurs what ends most rows."""
    short = {}
    for name, t in x.items():
        flat = t.reshape(len(t), -1).clone()
        fill = flat[:, -1].mode().values if name in spans and spans[name][0] > 0 else 0
        flat[:, max(1, flat.shape[1] // 4) :] = fill
        short[name] = flat.reshape(t.shape)
    return short


def _made_up_pairs(x: Mapping[str, Tensor], batch: int) -> list[RowPair]:
    """Return pairs of floats of each range, and of whole numbers that stand at the same place in one of the rows `x`.

    The new floats are the greater ones, so that a maximum shows them as well.
    """
    ranges = _RANGES if any(t.is_floating_point() for t in x.values()) else _RANGES[:1]
    pairs = []
    for number, (low, high) in enumerate(ranges):
        drawn: list[dict[str, Tensor]] = []
        for words in ("one", "other"):
            drawn.append({})
            for name, t in x.items():
                if t.is_floating_point():
                    values = draw_values((batch, *t.shape[1:]), t.dtype, words, name, low=low, high=high)
                    drawn[-1][name] = values if words == "one" else 3 * values + high
                else:
                    random = generator(derive(0, "made-up rows", words, name, number))
                    rows = torch.randint(len(t), (batch, *t.shape[1:]), generator=random)
                    drawn[-1][name] = t.gather(0, rows)
        pairs.append(_pair(drawn[0], drawn[1], f"range {number}"))
    return pairs


def _walks(trial: TrialRows, batch: int) -> list[RowPair]:
    """Return pairs in which the whole numbers of every span occur, as many as `WALKS` such pairs hold."""
    spans = {name: (low, high) for name, (low, high) in trial.spans.items() if high - low > 1}
    if not spans:
        return []
    rows = torch.arange(batch) % len(trial)
    pairs, most = [], 1
    for number in range(WALKS):
        if number == most:
            break
        both = []
        for half in range(2):
            values = _take(trial.inputs, rows)
            for name, (low, high) in spans.items():
                count = values[name].numel()
                # Each half of a pair keeps its own share of what is drawn: about half of both.
                most = max(most, -(-(high - low + 1) // count))
                walk = torch.randperm(high - low + 1, generator=generator(derive(0, "walk", name)))
                at = (torch.arange(count) + (number + half * WALKS) * count) % len(walk)
                values[name] = (low + walk[at]).reshape(values[name].shape).to(values[name].dtype)
            both.append(values)
        pairs.append(_pair(both[0], both[1], f"walk {number}"))
    return pairs
