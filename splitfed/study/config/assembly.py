"""Makes a topology whose pieces are written one by one: each is built when the shape of what reaches it is known.

The builder gets placeholders and says what the graph is; then one small batch walks the graph, and every placeholder
becomes a module that takes what arrives there.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, describe_error, first_line
from splitfed.core.random import derive
from splitfed.core.topology import Segment, Topology
from splitfed.data.dataset import Dataset
from splitfed.data.features import feed
from splitfed.models.build import make
from splitfed.models.import_paths import NameResolver
from splitfed.registry import is_foreign
from splitfed.study.config.piece_tables import piece_kind
from splitfed.study.config.run_spec import NamedAlgorithm
from splitfed.study.config.values import lists_to_tuples, parameters_of
from splitfed.topologies.fusion import Fusion

SEGMENT_KEYS = ("name", "role", "inputs", "outputs", "prefix")


class PiecePlaceholder(nn.Module):
    """Stands for the piece that `table` describes, until the shape of its input is known."""

    def __init__(self, path: str, table: Mapping[str, Any]) -> None:
        super().__init__()
        self.path, self.table = path, table


def assemble_topology(builder: NamedAlgorithm, data: Dataset, seed: int, code: NameResolver) -> Topology:
    """Return what `builder` makes of its parameters, tables of pieces replaced by modules initialised from `seed`.

    The last pieces are as wide as the labels in `data` need; import paths lead where `code` lets them. Raises
    `InvalidInput`; its `part` is the place of a piece that cannot be made, such as `topology.bottoms.lab`.
    """
    assert builder.factory is not None
    allowed = parameters_of(builder.factory)
    arguments = {
        key: _insert_placeholders(key, piece_kind(allowed[key].hint), lists_to_tuples(value), data)
        for key, value in builder.parameters.items()
    }
    if "targets" in allowed:
        # TOML has no null: a server that is not named learns the main label set.
        arguments["targets"] = {**dict.fromkeys(arguments["tops"]), **arguments.get("targets", {})}
    topology: Topology = builder.call(**arguments).with_tasks(data.tasks)
    values = feed(data.rows(range(min(2, len(data)))).x, topology.inputs, data.features)
    segments = []
    for segment in topology.segments:
        arriving = [values[name] for name in segment.inputs]
        if isinstance(segment.module, PiecePlaceholder):
            segment = replace(segment, module=_build_piece(segment.module, segment, topology, arriving, seed, code))
        values.update(zip(segment.outputs, _run_segment(segment, arriving), strict=True))
        segments.append(segment)
    return replace(topology, segments=tuple(segments))


def build_model(
    label: str,
    name: str,
    shape: tuple[Any, ...],
    outputs: int,
    seed: int,
    parameters: Mapping[str, Any],
    code: NameResolver,
) -> nn.Module:
    """Return the model `name` as `splitfed.models.build` does; whatever else it raises becomes an `InvalidInput`.

    `code`: where its import path may lead.
    """
    try:
        return make(name, code.load("models", name), shape, outputs, seed, parameters)
    except InvalidInput:
        raise
    except Exception as error:
        # A width that no memory holds, or a factory of the user's own that fails, in any way it likes.
        expected_error = isinstance(error, (RuntimeError, ValueError, TypeError, OverflowError, MemoryError))
        foreign = is_foreign("models", name)
        if not expected_error and not foreign:
            raise
        reason = describe_error(error) if foreign else first_line(error)
        raise InvalidInput(f"model {label} cannot be built: {reason}") from error


def _piece_error(path: str, text: object) -> InvalidInput:
    """Return the error of the piece at `path` below the topology's table."""
    error = InvalidInput(str(text))
    error.part = f"topology.{path}"
    return error


def _insert_placeholders(key: str, kind: str | None, value: Any, data: Dataset) -> Any:
    """Return `value` with a placeholder for every table of a piece in it."""
    match kind:
        case "segments":
            return [
                {k: v for k, v in table.items() if k in SEGMENT_KEYS} | {"module": _placeholder(f"{key}[{i}]", table)}
                for i, table in enumerate(value)
            ]
        case "piece" if isinstance(value, Mapping):
            return _placeholder(key, value)
        case "roles" if not isinstance(value.get("model"), str):
            return {role: _placeholder(f"{key}.{role}", table) for role, table in value.items()}
        case "roles" if data.features:
            return {role: _placeholder(key, value) for role in data.features}
        case "roles":
            raise _piece_error(key, "one table for all parties needs parties: add vertical, halves or strips to [data]")
    return value


def _placeholder(path: str, table: Mapping[str, Any]) -> nn.Module:
    if "fusion" in table:
        return Fusion(table["fusion"])
    return PiecePlaceholder(path, {key: value for key, value in table.items() if key not in SEGMENT_KEYS})


def _build_piece(
    piece: PiecePlaceholder,
    segment: Segment,
    topology: Topology,
    arriving: Sequence[Tensor],
    seed: int,
    code: NameResolver,
) -> nn.Module:
    """Build the piece for what arrives, as wide as its table says or, before a loss, as the labels need."""
    parameters = dict(piece.table)
    name, width = parameters.pop("model"), parameters.pop("width", None)
    head = next((h for h in topology.heads if segment.outputs == (h.value,)), None)
    shapes = [tuple(tensor.shape[1:]) for tensor in arriving]
    if len(shapes) > 1 and ":" not in name:
        raise _piece_error(
            piece.path, f"model {name} takes one value, not {', '.join(segment.inputs)}: join them by a fusion"
        )
    if head is not None:
        assert head.task is not None
        if width is not None:
            raise _piece_error(
                f"{piece.path}.width", f"{width} is not allowed: the labels say how wide the last piece is"
            )
        width = head.task.outputs or 1
    else:
        _check_width(piece.path, name, width, code)
    # A factory of the user's own gets one shape, or all where several values arrive.
    shape = shapes[0] if len(shapes) == 1 else tuple(shapes)
    try:
        return build_model(name, name, shape, width or 1, derive(seed, "piece", segment.name), parameters, code)
    except InvalidInput as error:
        blamed = [key for key in parameters if str(error).startswith(f"{key}=")]
        raise _piece_error(".".join([piece.path, *blamed[:1]]), error) from error


def _check_width(path: str, name: str, width: int | None, code: NameResolver) -> None:
    """Refuse a piece without a width that needs one, and one that has no use for it."""
    try:
        takes = ":" not in name or "outputs" in inspect.signature(code.load("models", name)).parameters
    except (InvalidInput, ValueError, TypeError):
        return  # `build_model` says what is wrong with the name.
    if takes and width is None:
        raise _piece_error(
            f"{path}.width", "is missing; expected a whole number, how many values a row the piece returns"
        )
    if width is not None and not takes:
        raise _piece_error(f"{path}.width", f"{width} is not allowed: {name} takes no 'outputs'")
    if width is not None and width < 1:
        raise _piece_error(f"{path}.width", f"width={width} is not allowed; expected a whole number of at least 1")


def _run_segment(segment: Segment, arriving: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what a copy of the segment makes of the batch."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            result = copy.deepcopy(segment.module).eval()(*(tensor.clone() for tensor in arriving))
    except InvalidInput:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        shapes = ", ".join(f"{v} {tuple(t.shape)}" for v, t in zip(segment.inputs, arriving, strict=True))
        raise InvalidInput(
            f"segment {segment.name!r} cannot take what arrives ({shapes}): {first_line(error)}"
        ) from error
    values = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(values) != len(segment.outputs):
        raise InvalidInput(
            f"segment {segment.name!r} returned {len(values)} values; it names {', '.join(segment.outputs)}"
        )
    other = next((type(value).__name__ for value in values if not isinstance(value, Tensor)), None)
    if other is not None:
        raise InvalidInput(f"segment {segment.name!r} returned a value of type {other}; expected tensors")
    return values
