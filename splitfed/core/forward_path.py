"""One way of a model through its `forward`: its operations, where it is cut, and what crosses there.

A model has a way for each mode, and more where what runs depends on truth values taken out of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitfed.core.attribute_reads import Reads
from splitfed.core.cut_names import relays
from splitfed.core.errors import InvalidInput
from splitfed.core.replay_answers import Answer

INPUT = -1
"""Stands for the operation in `OperationOutput` of an input."""


class OperationOutput(NamedTuple):
    """A tensor by its origin: number `place` among the tensors that operation `operation` returned."""

    operation: int
    place: int


class CrossingValue(NamedTuple):
    """The tensor `made` as it is when segment `source` ends, sent under a name.

    `batch`: the dimension of the batch, which is sent as the first one; None: it has none, and is sent for every row.
    `sometimes`: whether there are ways in which it does not cross; then zeros do. `origin`: its name where it was made,
    if it is handed on.
    """

    name: str
    source: int
    made: OperationOutput
    batch: int | None = 0
    sometimes: bool = False
    origin: str = ""

    def send(self, value: Tensor, rows: int) -> Tensor:
        """Return `value` as it crosses, (rows, ...)."""
        if self.batch == 0:
            return value
        return value.expand(rows, *value.shape) if self.batch is None else value.movedim(self.batch, 0)

    def receive(self, sent: Tensor) -> Tensor:
        """Return the value of which `send` made `sent`."""
        # Nobody waits for a gradient of what does not always cross.
        sent = sent.detach() if self.sometimes else sent
        if self.batch == 0:
            return sent
        return sent[0] if self.batch is None else sent.movedim(0, self.batch)


class CrossingForm(NamedTuple):
    """What a crossing value looks like: its shape a row, its type, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


@dataclass
class ForwardPath:
    """One way of a model through its `forward`: the names of all operations, and how many have run at each cut.

    `received`: for each segment, what it reads of earlier ones; `raw`: the inputs of the model that it reads;
    `outputs`: what the model returns, `results`: their names as they are returned. `state`: weight or buffer ->
    segment -> in how many places it is read there; `changed`: buffers that change; `draws`: operations that draw
    random numbers -> of which packages; `constants`: those whose results follow from shapes; `overwritten`: those on
    memory that constants made and more than shapes has overwritten; `reshapes`: whether one changes a shape in
    place. `reads`: crossing value -> segment -> in how many places it is read, its own segment included;
    `upstream`: crossing value -> the weights that it is computed from. `after`: the result behind which the last
    cut stands, if a result was named. `numbers`: operations that ask a tensor for a number -> what it is in this
    way, of which those `told` are asked by everybody, and those `free` may be any; see `replay_branches`. `labels`:
    what crosses or is returned -> its name; `forms`: name -> shape a row, type, and whether a gradient comes back.
    `kept`: weight or buffer -> the segments that change it by constants and nothing else, as whoever holds it and
    comes no earlier does too. `attributes`: what is read of the model's objects; `calls`: of
    calls of submodules, what those are told that do not run them; `wholes`: which operations are such calls;
    `by_holders`: those that change a weight or buffer by constants alone, or name it;
    `overwrites`: operations that change a tensor in place and return it, or nothing.
    `beyond`: ways that part from it behind the last cut; their party goes them unplanned. `branches`: whether
    there may be others; then `connected`: what the last segment reads and an output learns from.
    `constant_readers`: operation that makes a constant -> the segments whose operations read what comes of it.
    `repeated`: a tensor that an operation returns several times -> all of its places.
    `readers`: weight or buffer -> the operations that read it. `asked`: operations that returned a number -> that one.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    received: tuple[dict[str, CrossingValue], ...]
    raw: tuple[dict[str, None], ...]
    outputs: dict[str, CrossingValue]
    results: tuple[str, ...] = ()
    state: dict[str, dict[int, int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    draws: Mapping[int, frozenset[str]] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()
    reshapes: bool = False
    reads: dict[str, dict[int, int]] = field(default_factory=dict)
    upstream: dict[str, set[str]] = field(default_factory=dict)
    after: OperationOutput | None = None
    kept: dict[str, set[int]] = field(default_factory=dict)
    numbers: dict[int, Any] = field(default_factory=dict)
    told: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()
    labels: dict[tuple[OperationOutput, int], str] = field(default_factory=dict)
    forms: dict[str, CrossingForm] = field(default_factory=dict)
    attributes: Reads = field(default_factory=Reads)
    calls: Mapping[int, Answer] = field(default_factory=dict)
    wholes: frozenset[int] = frozenset()
    by_holders: frozenset[int] = frozenset()
    readers: dict[str, set[int]] = field(default_factory=dict)
    asked: Mapping[int, Any] = field(default_factory=dict)
    beyond: tuple[ForwardPath, ...] = ()
    branches: bool = False
    overwrites: frozenset[int] = frozenset()
    connected: set[str] = field(default_factory=set)
    overwritten: frozenset[int] = frozenset()
    constant_readers: Mapping[int, frozenset[int]] = field(default_factory=dict)
    repeated: dict[OperationOutput, list[int]] = field(default_factory=dict)

    def runs(self, segment: int, operation: int) -> bool:
        """Return whether the party of `segment` runs the code of `operation`, be it on shapes."""
        first, last = self.bounds(segment)
        return operation < last and (operation >= first or operation not in self.calls)

    def computes(self, segment: int, operation: int) -> bool:
        """Return whether the party of `segment` needs the numbers that `operation` returns."""
        first, last = self.bounds(segment)
        return first <= operation < last or segment in self.constant_readers.get(operation, ())

    def attributes_read(self, segment: int) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """Return path -> attributes that operations of `segment` read, and that others' code reads on its party's way.

        What is looked up right before the end of a segment is for the next one.
        """
        first, last = self.bounds(segment)
        end = last + (segment == len(self.ends))
        own = self.attributes.names(lambda n: first <= n < end, lambda n: self.computes(segment, n))
        return own, self.attributes.names(lambda n: n < first or n == last, lambda n: self.runs(segment, n))

    def next_told(self, number: int) -> int | None:
        """Return the first operation from `number` on whose answer is told."""
        return min((n for n in self.told if n >= number), default=None)

    def rename(self, name: str, other: str) -> bool:
        """Call what crosses as `name` `other`, unless something is called so already, or it is an output."""
        if other in self.forms or name in self.outputs:
            return False
        self.forms[other] = self.forms.pop(name)
        self.labels = {key: other if label == name else label for key, label in self.labels.items()}
        if name in self.reads:
            self.reads[other], self.upstream[other] = self.reads.pop(name), self.upstream.pop(name)
        for received in self.received:
            if name in received:
                received[other] = received.pop(name)._replace(name=other)
        return True

    def widen(self, model: str) -> None:
        """Let the last segment get what it reads in ways that part behind the last cut, too.

        Refuses what takes a gradient back: where nothing reads it there would be one of zeros in place of none.
        """
        last, own = len(self.ends), set(self.connected)
        for other in self.beyond:
            self.connected |= other.connected
            self.raw[last].update(other.raw[last])
            for name, value in other.received[last].items():
                if name in self.received[last]:
                    continue
                learning = (self.upstream[n] for n in own)
                if name in other.connected and not other.upstream[name] <= set().union(*learning):
                    behind = (n for n in self.asked if n >= self.ends[-1])
                    asked = min(n for n in behind if other.asked.get(n) != self.asked[n])
                    raise InvalidInput(
                        f"{model} reads {name!r} behind the last cut in some batches only, by a branch on a number "
                        f"that {self.names[asked]!r} takes out of a tensor: weights behind it would get a gradient of "
                        "zeros in place of none; read it in every case (torch.where), or cut behind the branch"
                    )
                self.received[last][name] = value
                self.upstream.setdefault(name, other.upstream.get(name, set()))
                self.forms.setdefault(name, other.forms[name])

    def lasts(self, number: int) -> bool:
        """Return whether what operation `number` returns on shapes is the same in every batch of this way."""
        return all(n > number or isinstance(self.numbers[n], bool) for n in self.told)

    def shared_with(self, other: ForwardPath) -> int:
        """Return before which operation this way and `other` are one."""
        differing = {n for n in self.told | other.told if self.numbers.get(n) is not other.numbers.get(n)}
        truths = {n for n in differing if isinstance(self.numbers.get(n, other.numbers.get(n)), bool)}
        return min(truths, default=len(self.names))

    def send_inputs(self, names: Sequence[str], inputs: Sequence[str]) -> None:
        """Let the first segment send what later ones read of `names`, some of the model's `inputs`."""
        for name in names:
            for raw, received in zip(self.raw[1:], self.received[1:], strict=True):
                if name in raw:
                    del raw[name]
                    self.raw[0][name] = None
                    received[f"{name}_sent"] = CrossingValue(
                        f"{name}_sent", 0, OperationOutput(INPUT, inputs.index(name))
                    )

    def hand_on(self, chain: Sequence[str]) -> None:
        """Let what crosses go along `chain`, the party of each segment; see `cut_names.relays`."""
        for target, received in enumerate(list(self.received)):
            for name, value in list(received.items()):
                for relay in relays(chain, value.source, target):
                    self.received[relay].setdefault(value.name, value)
                    value = value._replace(name=f"{name}_{chain[relay]}", source=relay, origin=name)
                del received[name]
                received[value.name] = value

    def segment(self, operation: int) -> int:
        """Return the segment in which `operation` runs."""
        return sum(operation >= end for end in self.ends)

    def bounds(self, segment: int) -> tuple[int, int]:
        """Return the number of the first operation of `segment`, and of the first one after it."""
        limits = (0, *self.ends, len(self.names))
        return limits[segment], limits[segment + 1]

    def sent(self, segment: int) -> dict[str, CrossingValue]:
        """Return what `segment` hands on or returns as an output of the model, by name."""
        values = {**{n: c for received in self.received for n, c in received.items()}, **self.outputs}
        return {name: value for name, value in values.items() if value.source == segment}


def align_ways(model: str, ways: Sequence[ForwardPath]) -> None:
    """Let as much as can be cross in all of `ways` of `model`, and mark what crosses in some alone.

    What is of one form takes the place of another: `h` in one way and `-h` in the other cross under one name. Refuses
    what crosses in some alone and takes a gradient back.
    """
    for way in ways[1:]:
        for segment, received in enumerate(way.received):
            lacking = [name for name in ways[0].received[segment] if name not in received]
            for name in [name for name in received if name not in ways[0].received[segment]]:
                place = (way.forms[name], received[name].source)
                same = (n for n in lacking if (ways[0].forms[n], ways[0].received[segment][n].source) == place)
                if (other := next(same, None)) is not None and way.rename(name, other):
                    lacking.remove(other)
    for segment in range(len(ways[0].received)):
        crossing = [way.received[segment] for way in ways]
        for name in dict.fromkeys(name for received in crossing for name in received):
            if all(name in received for received in crossing):
                continue
            if any(way.forms[name].learns for way in ways if name in way.forms):
                raise InvalidInput(
                    f"value {name!r} of {model} crosses in some batches only, by a number taken out of a tensor: "
                    "weights behind it would get a gradient of zeros in place of none; read it in every case "
                    "(torch.where), or let no cut lie between where it is made and where it is read"
                )
            for received in crossing:
                if name in received:
                    received[name] = received[name]._replace(sometimes=True)
