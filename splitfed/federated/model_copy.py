"""Construction of a second model beside the topology's: the same architecture with new random weights, or a module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.initial_weights import redraw_weights
from splitfed.core.topology import Segment, Topology
from splitfed.federated.topology_values import making_segment


@dataclass(frozen=True)
class Mirror:
    """Segments of a second model at one role; `names`: value of the first model -> the second model's name for it."""

    segments: tuple[Segment, ...]
    names: Mapping[str, str]


def copy_segments(who: str, topology: Topology, part: Collection[str], prefix: str, role: str, seed: int) -> Mirror:
    """Return copies of the segments `part` of `topology`, at `role`, with new random weights from `seed`.

    Their segments and values get the prefix `prefix` and an underscore. Values from outside of `part` are read under
    their own names.
    """
    own = [s for s in topology.segments if s.name in part]
    return copy_with_modules(topology, part, prefix, role, redraw_weights(who, {s.name: s.module for s in own}, seed))


def copy_with_modules(
    topology: Topology,
    part: Collection[str],
    prefix: str,
    role: str | None,
    modules: Mapping[str, nn.Module],
    known: Mapping[str, str] | None = None,
) -> Mirror:
    """Return copies of the segments `part` with these `modules`, at `role` (None: each at its own role).

    `known`: value from outside of `part` -> the name under which the copies read it.
    """
    own = [s for s in topology.segments if s.name in part]
    names = {**(known or {}), **{value: f"{prefix}_{value}" for s in own for value in s.outputs}}
    again = tuple(
        Segment(
            f"{prefix}_{s.name}",
            role or s.role,
            modules[s.name],
            tuple(names.get(v, v) for v in s.inputs),
            tuple(names[v] for v in s.outputs),
            # Segments that share a module share its copy, so that the state keeps the same names.
            s.prefix if modules[s.name] is s.module else f"{prefix}.{s.full('')}",
        )
        for s in own
    )
    return Mirror(again, names)


def copied_value(value: str) -> str:
    """Return the name under which a party has a copy of `value` that it was sent beside the pass of its own model."""
    return f"told_{value}"


def deliver(topology: Topology, values: Mapping[str, str]) -> Topology:
    """Return `topology` with segments by which other parties are sent values in training, without a gradient back.

    `values`: value -> the role that needs it; nothing is added for a value that this role makes itself.
    """
    added = tuple(
        Segment(copied_value(value), role, nn.Identity(), (value,), (copied_value(value),))
        for value, role in values.items()
        if making_segment(topology, value).role != role
    )
    return replace(
        topology,
        segments=(*topology.segments, *added),
        training_only=topology.training_only | {s.name for s in added},
        forward_only=topology.forward_only | {f"{making_segment(topology, s.inputs[0]).name}->{s.name}" for s in added},
    )


def replace_segments(
    who: str, topology: Topology, part: Collection[str], prefix: str, role: str, module: nn.Module, value: str
) -> Mirror:
    """Return `module` as one segment at `role` that computes from the raw inputs what the segments `part` do: `value`.

    Raises `InvalidInput` if segments outside of `part` read more than that one value.
    """
    replaced_values = {v for s in topology.segments if s.name in part for v in s.outputs}
    read = {v for s in topology.segments if s.name not in part for v in s.inputs} | {h.value for h in topology.heads}
    if left := sorted((replaced_values & read) - {value}):
        raise InvalidInput(f"{who}: a module of one output cannot stand for segments that also make {left[0]!r}")
    name = f"{prefix}_{value}"
    return Mirror((Segment(prefix, role, module, tuple(topology.inputs), (name,)),), {value: name})
