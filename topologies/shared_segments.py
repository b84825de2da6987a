"""Shared segments of clients with different models: segments that are equivalent for all clients become one.

Every client's model is cut separately, so that each topology has a server of its own. If these have the same
architecture, the first client's server and its names of values replace all others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, first_line
from splitfed.core.random import stream
from splitfed.core.topology import Segment, Topology


def share_segments(topologies: Sequence[Topology], rows: Mapping[str, Tensor]) -> tuple[Topology, ...]:
    """Return `topologies`, one a client, with the first client's segments at roles that all clients share.

    `rows`: value -> (n, ...) of every input of the first. A shared segment must have the same architecture: weights of
    the same shapes in the same order, and with equal weights the same outputs for the same inputs, in training and
    evaluation. One topology for several clients is kept. Raises `InvalidInput` that names the client.
    """
    first = topologies[0]
    shared = [s.name for s in first.segments if s.role not in first.data_roles]
    arriving = _arriving_values(first, rows) if shared else {}
    made: dict[int, Topology] = {id(first): first}
    for client, topology in enumerate(topologies):
        if id(topology) not in made and shared:
            made[id(topology)] = _join(first, topology, shared, arriving, f"client {client}")
    return tuple(made.get(id(topology), topology) for topology in topologies)


def _join(
    first: Topology, topology: Topology, shared: Sequence[str], arriving: Mapping[str, Sequence[Tensor]], who: str
) -> Topology:
    """Return `topology` with the `shared` segments of `first`, and its names of their values."""
    names, wanted = ([f"{s.name} at {s.role}" for s in t.segments] for t in (topology, first))
    if names != wanted:
        raise InvalidInput(f"{who} has segments {names}; the first client has {wanted}")
    renamed: dict[str, str] = {}
    for own, of_first in zip(topology.segments, first.segments, strict=True):
        for mine, theirs in ((own.inputs, of_first.inputs), (own.outputs, of_first.outputs)):
            if len(mine) != len(theirs) or any(
                renamed.setdefault(one, other) != other for one, other in zip(mine, theirs, strict=True)
            ):
                raise InvalidInput(
                    f"segment {own.name!r} of {who} takes and returns other values than the first client's: "
                    f"{', '.join(mine)}, not {', '.join(theirs)}"
                )
    segments = []
    for own, of_first in zip(topology.segments, first.segments, strict=True):
        if own.name in shared:
            _check_same(own, of_first, arriving[own.name], who)
        kept = of_first if own.name in shared else own
        # The comparison of the original model with its pieces does not hold for pieces of the first client.
        segments.append(replace(kept, inputs=of_first.inputs, outputs=of_first.outputs, original=None))
    return replace(
        topology,
        segments=_with_distinct_names(segments, shared),
        inputs={renamed[value]: role for value, role in topology.inputs.items()},
        heads=tuple(replace(head, value=renamed[head.value]) for head in topology.heads),
        sent_inputs=tuple(renamed[value] for value in topology.sent_inputs),
    )


def _with_distinct_names(segments: Sequence[Segment], shared: Sequence[str]) -> tuple[Segment, ...]:
    """Return `segments`, where unshared ones get their name as a prefix if names of weights collide."""
    keys = [{s.full(key) for key in s.module.state_dict()} for s in segments]
    taken = {key for s, own in zip(segments, keys, strict=True) if s.name in shared for key in own}
    if not any(own & taken for s, own in zip(segments, keys, strict=True) if s.name not in shared):
        return tuple(segments)
    return tuple(s if s.name in shared else replace(s, prefix=f"{s.name}.") for s in segments)


def _check_same(own: Segment, of_first: Segment, arriving: Sequence[Tensor], who: str) -> None:
    """Raise `InvalidInput` for a shared segment that differs in architecture from the first client's."""
    refusal = f"segment {own.name!r}, which clients share, has another architecture for {who} than for the first client"
    advice = "cut these models so that their last pieces match, or leave them whole (topology 'local')"
    mine, theirs = _describe_state(own.module), _describe_state(of_first.module)
    if mine != theirs:
        raise InvalidInput(f"{refusal} (weights {', '.join(mine)}, not {', '.join(theirs)}): {advice}")
    other = copy.deepcopy(own.module)
    with torch.no_grad():
        for tensor, wanted in zip(_state(other), _state(of_first.module), strict=True):
            tensor.copy_(wanted)
    for training in (True, False):
        try:
            results = [_run(copy.deepcopy(module).train(training), arriving) for module in (other, of_first.module)]
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
            raise InvalidInput(f"{refusal} ({first_line(error)}): {advice}") from error
        if len(results[0]) != len(results[1]) or not all(map(torch.equal, *results)):
            raise InvalidInput(f"{refusal} (different outputs with the same weights): {advice}")


def _describe_state(module: nn.Module) -> list[str]:
    """Return the shapes of weights and buffers in order, and which weights are frozen."""
    weights = [(p, "" if p.requires_grad else " frozen") for p in module.parameters()]
    state = [*weights, *((buffer, " buffer") for buffer in module.buffers())]
    return [f"{'x'.join(map(str, tensor.shape)) or 'a number'}{kind}" for tensor, kind in state]


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _run(module: nn.Module, arriving: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad(), stream(0):
        found = module(*(tensor.clone() for tensor in arriving))
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _arriving_values(topology: Topology, rows: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return segment -> its inputs for `rows`, computed by copies in evaluation mode."""
    values, arriving = dict(rows), {}
    for segment in topology.segments:
        arriving[segment.name] = [values[name] for name in segment.inputs]
        values.update(
            zip(segment.outputs, _run(copy.deepcopy(segment.module).eval(), arriving[segment.name]), strict=True)
        )
    return arriving
