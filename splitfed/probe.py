"""Send one example batch through a topology before anything is trained, and note what each segment does.

The shapes tell a misfit by cut; whether a segment overwrites its input decides who needs a copy; whether it draws
random numbers decides who is reseeded at every step. Modules, buffers and random state are left as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitfed.errors import InvalidInput
from splitfed.graph import Segment, Topology


@dataclass(frozen=True)
class Facts:
    """What the probe saw. `shapes` and `dtypes` are per value, without the batch dimension.

    `overwritten`: segment -> the inputs it overwrites in place; `stochastic`: segments that draw random numbers in
    training; `batch_norm`: segments that need at least two rows in training.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    overwritten: Mapping[str, frozenset[str]]
    stochastic: frozenset[str]
    batch_norm: frozenset[str]


def probe(topology: Topology, batch: Mapping[str, Tensor]) -> Facts:
    """Run `batch` (input value -> tensor of at least two rows) through copies of the segments, in training mode.

    Raises `InvalidInput` that names the segment, the edge and the shapes where something does not fit, and for a
    value that is no floating tensor with the batch first.
    """
    for name in topology.inputs:
        if name not in batch:
            raise InvalidInput(f"input {name!r} of topology {topology.name!r} is fed by no data")
    values = dict(batch)
    rows = len(next(iter(batch.values())))
    overwritten: dict[str, frozenset[str]] = {}
    stochastic: set[str] = set()
    for segment in topology.segments:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs, overwritten[segment.name], draws = _try(topology, segment, values)
        if draws:
            stochastic.add(segment.name)
        for name, value in zip(segment.outputs, outputs, strict=True):
            _check_value(segment, name, value, rows)
            values[name] = value
    norm = {s.name for s in topology.segments if _has_batch_norm(s.module)}
    return Facts(
        {name: tuple(v.shape[1:]) for name, v in values.items()},
        {name: v.dtype for name, v in values.items()},
        overwritten,
        frozenset(stochastic),
        frozenset(norm),
    )


def check_alike(topologies: Sequence[Topology], facts: Sequence[Facts]) -> None:
    """Refuse clients whose values enter a segment that serves them all in different shapes or types.

    One topology and one probe a client. Raises `InvalidInput` that names client, value and shapes.
    """
    first = topologies[0]
    entering = [value for s in first.segments if s.role not in first.data_roles for value in s.inputs]
    for client, known in enumerate(facts):
        for value in entering:
            mine, wanted = ((f.shapes[value], f.dtypes[value]) for f in (known, facts[0]))
            if mine != wanted:
                raise InvalidInput(
                    f"client {client} sends {value!r} as {mine[0]} of {mine[1]} a row, client 0 as {wanted[0]} of "
                    f"{wanted[1]}: the segment that reads it serves them all"
                )


def _try(
    topology: Topology, segment: Segment, values: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, ...], frozenset[str], bool]:
    written: set[str] = set()
    # In evaluation mode first: what it overwrites there counts too, and what it returns in training is handed on.
    for training in (False, True):
        module = copy.deepcopy(segment.module).train(training)
        given = [values[name].clone() for name in segment.inputs]
        versions = [tensor._version for tensor in given]
        before = torch.random.get_rng_state()
        try:
            result = module(*given)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
            raise InvalidInput(_misfit(topology, segment, values, error)) from error
        draws = not torch.equal(before, torch.random.get_rng_state())
        # `tensor.data` and storages are written without a new version.
        for name, tensor, version in zip(segment.inputs, given, versions, strict=True):
            if tensor._version != version or not torch.equal(tensor, values[name]):
                written.add(name)
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(outputs) != len(segment.outputs):
        raise InvalidInput(
            f"segment {segment.name!r} returned {len(outputs)} values; it names {len(segment.outputs)}: "
            f"{', '.join(segment.outputs)}"
        )
    return outputs, frozenset(written), draws


def _misfit(topology: Topology, segment: Segment, values: Mapping[str, Tensor], error: BaseException) -> str:
    shapes = ", ".join(f"{name} {tuple(values[name].shape)}" for name in segment.inputs)
    edges = [e.name for e in topology.edges if e.target == segment.name]
    place = f"edge{'s' * (len(edges) > 1)} {', '.join(edges)}" if edges else f"input of {segment.name!r}"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"segment {segment.name!r} cannot take what arrives on {place} ({shapes}): {reason}"


def _check_value(segment: Segment, name: str, value: object, rows: int) -> None:
    if not isinstance(value, Tensor):
        raise InvalidInput(
            f"value {name!r} of segment {segment.name!r} is a {type(value).__name__}, no tensor: it cannot cross a "
            "cut; cut elsewhere"
        )
    if value.dim() == 0 or len(value) != rows:
        raise InvalidInput(
            f"value {name!r} of segment {segment.name!r} has shape {tuple(value.shape)}; the first dimension must "
            f"be the batch ({rows} rows here)"
        )
    if not value.is_floating_point():
        raise InvalidInput(f"value {name!r} of segment {segment.name!r} is {value.dtype}: no gradient can return")


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
