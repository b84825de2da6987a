"""Detection of arrays that parties hold besides weights, which are refused if they contain rows of the data.

Rows are compared number by number, whatever their type and shape: an array that was scaled, or mixed with others, is
only named. Not compared are rows that are not in memory, and those that carry no information: single numbers, constant
rows, and whole numbers in a plain pattern, such as a mask or 0, 1, 2, ... Labels are not searched for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from splitfed.core.equivalence import describe_proof
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs
from splitfed.core.held_arrays import HeldArray, held_arrays, numbers_in
from splitfed.core.rows import RowSource, blocks, in_memory
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.weight_sharing import count_weights
from splitfed.data.dataset import Dataset, Federation
from splitfed.data.features import FeatureRows

# Second differences from which on a row of whole numbers is no plain pattern: a step has two, a single 1 three.
_BENDS = 4

Array = np.ndarray[Any, Any]


def lines_told(topology: Topology, facts: TopologyFacts, parts: Collection[str] = ()) -> list[str]:
    """Return notes on `topology` for the user, one line each: what parties learn or hold, and what is not proved.

    `parts`: the named parts of a row of the data; those that no segment reads are named if others are read.
    """
    proof = describe_proof(count_weights(segment.module for segment in topology.segments))
    held = lines_held(topology)
    unread = sorted(set(parts).difference(topology.inputs)) if set(parts).intersection(topology.inputs) else []
    unused = [f"{name!r} of the data is read by no segment" for name in unread]
    return [*map(str, facts.told(topology)), *held, *([proof] if proof else []), *unused]


def lines_held(topology: Topology) -> list[str]:
    """Return what parties hold besides weights and buffers, a line an array, each with all roles that hold it."""
    roles = group_pairs((what, role) for role, what in _named(topology))
    return [f"{' and '.join(found)} {'hold' if len(found) > 1 else 'holds'} {what}" for what, found in roles.items()]


def arrays_of(topology: Topology, role: str) -> list[str]:
    """Return the names of the arrays that the segments of `role` hold besides weights and buffers."""
    return [what for owner, what in _named(topology) if owner == role]


def _named(topology: Topology) -> list[tuple[str, str]]:
    found = [(s.role, one) for s in topology.segments for one in held_arrays(s.module) if one.named]
    return list(dict.fromkeys((role, f"the array {one.name} {one.shape}") for role, one in found))


def check_held_rows(topology: Topology, data: Federation) -> None:
    """Raise `InvalidInput` for a segment that holds rows of `data`; no data is read if no segment holds such an array.

    Weights and buffers are compared too. The error names segment, array and row.
    """
    held = [(s, one) for s in topology.segments for one in (*_state(s), *held_arrays(s.module))]
    wanted: dict[int, _Wanted] = {}
    for part, rows in _parts(topology, data) if held else ():
        width = math.prod(rows.shape)
        if width not in wanted:
            wanted[width] = _Wanted(width, held)
        wanted[width].check(part, rows)


@dataclass
class _Wanted:
    """The rows of `width` numbers in the arrays that segments hold; digests of those that start as rows of data do."""

    width: int
    held: Sequence[tuple[Segment, HeldArray]]
    rows: list[tuple[Array, tuple[Segment, HeldArray]]] = field(init=False)
    firsts: Array = field(init=False)
    started: set[float] = field(init=False, default_factory=set)
    by_digest: dict[bytes, tuple[Segment, HeldArray]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = [(rows, pair) for pair in self.held for rows in _as_rows(pair[1], self.width)]
        self.firsts = np.unique(np.concatenate([_plain(rows[:, 0]) for rows, _ in self.rows] or [np.zeros(0)]))

    def digest(self, firsts: Array) -> None:
        """Digest all held rows that start with one of `firsts`."""
        if len(new := np.setdiff1d(firsts, np.array(list(self.started), np.float32))):
            self.started.update(new.tolist())
            for rows, pair in self.rows:
                self.by_digest |= dict.fromkeys((digest for _, digest in _digests(rows, new)), pair)

    def check(self, part: str, source: RowSource) -> None:
        """Raise `InvalidInput` for the first of the rows of `source`, described by `part`, that a segment holds."""
        start = 0
        for few in blocks(source) if len(self.firsts) else ():
            rows = few.detach().cpu().numpy().reshape(len(few), -1)
            self.digest(np.intersect1d(_plain(rows[:, 0]), self.firsts))
            for number, digest in _digests(rows, self.firsts):
                if (found := self.by_digest.get(digest)) is not None:
                    segment, one = found
                    raise InvalidInput(
                        f"segment {segment.name!r} of {segment.role!r} holds row {start + number} of {part} in "
                        f"{one.name} {one.shape}: a party may only hold rows that it owns or receives; remove the "
                        "array, or pass rows as an input"
                    )
            start += len(few)


def _state(segment: Segment) -> Iterator[HeldArray]:
    for name, tensor in (*segment.module.named_parameters(), *segment.module.named_buffers()):
        kind = "weight" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        for numbers, _ in numbers_in(tensor) if tensor.dim() else ():
            yield HeldArray(f"{kind} {name!r}", tuple(tensor.shape), numbers)


def _parts(topology: Topology, data: Federation) -> Iterator[tuple[str, RowSource]]:
    """Yield all rows in memory, whole and as each input gets them, with a description."""
    parts: dict[str, Dataset] = {"the auxiliary rows": data.auxiliary, "the victims": data.victims}
    for client in data.clients:
        for name in ("train", "validation", "test"):
            parts[f"the {name} rows of {client.name}"] = getattr(client, name)
    for name, rows in parts.items():
        if len(rows) and in_memory(rows.source):
            yield name, rows.source
            for value in topology.inputs:
                if value in rows.features:
                    yield name, FeatureRows(rows.source, rows.features[value])


def _as_rows(held: HeldArray, width: int) -> Iterator[Array]:
    """Yield the numbers of `held` as rows of `width`, along its last dimensions, and along its first."""
    numbers = held.numbers
    if numbers.size and numbers.size % max(width, 1) == 0 and width > 1:
        yield numbers.reshape(-1, width)
        if numbers.ndim == 2 and numbers.shape[0] == width:
            yield numbers.T


def _plain(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers, dtype=np.float32) + np.float32(0)  # -0 is 0


def _digests(rows: Array, firsts: Array) -> Iterator[tuple[int, bytes]]:
    """Yield number and digest of each of `rows` (n, width) that is informative, and starts like one of `firsts`."""
    chosen = np.isin(_plain(rows[:, 0]), firsts).nonzero()[0]
    plain = _plain(rows[chosen])
    fractions = (plain != np.round(plain)).any(1)
    bends = (np.diff(plain, n=2, axis=1) != 0).sum(1)
    telling = (plain != plain[:, :1]).any(1) & (fractions | (bends >= _BENDS))
    for number in telling.nonzero()[0].tolist():
        yield int(chosen[number]), hashlib.blake2b(plain[number].tobytes(), digest_size=16).digest()
