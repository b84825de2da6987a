"""What is known of a topology from one example batch: shapes, who overwrites, draws or learns, and what crosses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from splitfed.core.contents import FEATURES, Content, Origin, describe
from splitfed.core.topology import Edge, Topology


class Told(NamedTuple):
    """What a value that crosses on `edge`, between two roles, tells the receiver of inputs that it does not own."""

    edge: str
    source: str
    target: str
    value: str
    origin: Origin

    @property
    def what(self) -> str:
        """What it does and of what, in a few words."""
        return f"{'carries' if self.origin.content is Content.INPUT else 'reveals'} {describe(self.origin)}"

    def __str__(self) -> str:
        """Say it in a clause, with value and edge."""
        return f"value {self.value!r} on {self.edge} ({self.source} to {self.target}) {self.what}"


class Finding(NamedTuple):
    """What a changed row shows in: `segment`, and the value, the state or the place `name`.

    `kind`: "state", which is stored with the weights; "output", of other rows, in training; "evaluation", the same in
    evaluation mode; "memory", whatever else can be reached from the segment; "next batch"; "count": of a row, by its
    place in the batch or by how many rows that has; "loss", of other rows; or "scale": the rows' losses are their own,
    but not over the number of rows.
    """

    segment: str
    kind: str
    name: str


@dataclass(frozen=True)
class TopologyFacts:
    """What an example batch has shown of a topology. `shapes` and `dtypes` are per value, without the batch dimension.

    `overwritten`: segment -> the inputs it overwrites in place; `stochastic`: segments that draw random numbers in
    training; `batch_norm`: segments that need at least two rows in training; `no_gradient`: value and segment that
    reads it, where no gradient comes back: whatever the segment makes of it, no head learns from it. One that a user
    wrote by hand and that draws random numbers is never among these: another draw may take another way. `origins`: what
    each value is made of. `plain_draws`: segments that draw from NumPy's or Python's default generators in training.
    `row_findings`: where rows of the run show in others; None where nobody has promised anything that asks for it.
    `repeated`: values that have no rows of their own, but are one tensor for a batch, sent once for every row.
    `changed_in_evaluation`: segments of which a pass in evaluation mode changes a weight, a buffer or an attribute.
    `resized`: segment and buffer that has another shape after a pass in training.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    overwritten: Mapping[str, frozenset[str]]
    stochastic: frozenset[str]
    batch_norm: frozenset[str]
    no_gradient: frozenset[tuple[str, str]] = frozenset()
    origins: Mapping[str, Origin] = field(default_factory=dict)
    plain_draws: frozenset[str] = frozenset()
    row_findings: tuple[Finding, ...] | None = None
    repeated: frozenset[str] = frozenset()
    changed_in_evaluation: frozenset[str] = frozenset()
    resized: tuple[tuple[str, str], ...] = ()

    def origin(self, value: str) -> Origin:
        """Return what `value` is made of: features, where no example shows it."""
        return self.origins.get(value, FEATURES)

    def data(self, values: Iterable[str]) -> tuple[str, ...]:
        """Return those of `values` that hold data: no constants, and nothing that tells of lengths and masks alone."""
        return tuple(value for value in values if self.origin(value).is_data)

    def defended(self, values: Iterable[str]) -> tuple[str, ...]:
        """Return those of `values` that a defense of releases acts on: floating numbers that hold data."""
        return tuple(value for value in self.data(values) if self.dtypes[value].is_floating_point)

    def told(self, topology: Topology) -> tuple[Told, ...]:
        """Return what crosses and tells of inputs by itself: values that carry one, lengths and masks.

        Where a secure computation hides what crosses nobody is told.
        """
        return told_by(topology, self.origins)

    def returned(self, topology: Topology, edge: Edge) -> tuple[str, ...]:
        """Return the values of `edge` whose gradient comes back on it in training, in their order."""
        if edge.name in topology.forward_only:
            return ()
        # Behind what holds no data nothing learns.
        data = self.data(edge.values)
        if not self.no_gradient:
            return data
        # A value that several segments of another role read crosses once, and so does the sum of its gradients.
        crosses = topology.role_of(edge.source) != topology.role_of(edge.target)
        readers = topology.readers(edge) if crosses else (edge.target,)
        reads = {name: topology.segment(name).inputs for name in readers}
        return tuple(v for v in data if any(v in reads[r] and (v, r) not in self.no_gradient for r in readers))


def told_by(topology: Topology, origins: Mapping[str, Origin]) -> tuple[Told, ...]:
    """Return what crosses and tells of inputs by itself, by the `origins` of values; see `TopologyFacts.told`."""
    found = []
    for edge in topology.crossings if topology.computation is None else ():
        source, target = topology.role_of(edge.source), topology.role_of(edge.target)
        for value in edge.values:
            one = origins.get(value, FEATURES)
            names = tuple(name for name in one.inputs if topology.inputs[name] != target)
            if names:
                found.append(Told(edge.name, source, target, value, one._replace(inputs=names)))
    return tuple(found)
