"""Custom: any directed acyclic graph of segments, written as objects or as plain mappings, in any order.

A value is a named tensor: segments read and return values, a role owns each value that no segment returns, and a head
computes the loss of one. Segments are sorted in the order they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from torch import nn

from splitfed.core.errors import InvalidInput, check_names, check_number
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Segment, Topology


def custom(
    segments: Sequence[Segment | Mapping[str, Any]],
    inputs: Mapping[str, str],
    heads: Sequence[Head | Mapping[str, Any]],
    task: Task | None = None,
    holders: Sequence[str] = (),
    sent_inputs: Sequence[str] = (),
) -> Topology:
    """Return the topology of `segments`, `inputs` (value -> the role that owns it) and `heads`.

    A segment is a `Segment` or a mapping with name, role, module and inputs, and with outputs unless the only one has
    the segment's name; likewise a `Head`, or a mapping with value and labels, whose default role is that of the segment
    which computes the value. `task` applies to heads without one. `holders`: roles that hold only labels; any other
    role of a head must be that of a segment or an input. `sent_inputs`: inputs that other parties may see unchanged, or
    changed by constants only. Raises `InvalidInput`.
    """
    _check_list("segments", segments)
    _check_list("heads", heads)
    if not isinstance(inputs, Mapping) or not all(isinstance(role, str) for role in inputs.values()) or not inputs:
        raise InvalidInput(f"inputs={inputs!r} is not allowed; expected value -> role that owns it, at least one")
    parsed_segments = [_segment(f"segments[{i}]", one) for i, one in enumerate(segments)]
    makers = {value: segment.role for segment in parsed_segments for value in segment.outputs}
    losses = [_head(f"heads[{i}]", one, makers) for i, one in enumerate(heads)]
    _check_roles(losses, {*(s.role for s in parsed_segments), *inputs.values(), *holders})
    ready = tuple(head if head.task else replace(head, task=task) for head in losses)
    return Topology(
        "custom", _sort_segments(parsed_segments, inputs), dict(inputs), ready, sent_inputs=tuple(sent_inputs)
    )


def _check_roles(heads: Sequence[Head], roles: set[str]) -> None:
    for head in heads:
        kind = f"role at the head on {head.value!r} (for labels alone: name it in holders)"
        check_names(kind, roles, *head.path)


def _check_list(what: str, given: object) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise InvalidInput(f"{what}={given!r} is not allowed; expected a list with at least one table")


def _segment(where: str, given: Segment | Mapping[str, Any]) -> Segment:
    if isinstance(given, Segment):
        return given
    found = _keys(where, given, Segment, {"outputs"})
    if not isinstance(found["module"], nn.Module):
        kind = type(found["module"]).__name__
        raise InvalidInput(f"{where}: module is a {kind}; expected an nn.Module")
    found.setdefault("outputs", [found["name"]])
    return Segment(**found | {key: _names(f"{where}: {key}", found[key]) for key in ("inputs", "outputs")})


def _head(where: str, given: Head | Mapping[str, Any], makers: Mapping[str, str]) -> Head:
    if isinstance(given, Head):
        return given
    found = _keys(where, given, Head, {"role"})
    check_names("value at a head:", makers, found["value"])
    found.setdefault("role", makers[found["value"]])
    check_number(f"{where}: weight", found.get("weight", 1.0), low=0.0, open_low=True)
    return Head(**found | {"via": _names(f"{where}: via", found.get("via", ()))})


def _keys(where: str, given: object, kind: type[Segment | Head], known: set[str]) -> dict[str, Any]:
    """Return the mapping `given` after a check of its keys; those in `known` may be missing."""
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{where} is a {type(given).__name__}; expected a {kind.__name__} or a mapping")
    check_names(f"key of {where}:", [f.name for f in fields(kind)], *given)
    for field in fields(kind):
        if field.default is MISSING and field.name not in given and field.name not in known:
            raise InvalidInput(f"{where} has no {field.name!r}; it has {', '.join(map(repr, given)) or 'nothing'}")
        value = given.get(field.name, field.default)
        text = str(field.type).startswith("str") and field.name in given
        if text and not isinstance(value, str) and (value is not None or field.default is MISSING):
            raise InvalidInput(f"{where}: {field.name}={value!r} is not allowed; expected text")
    return dict(given)


def _names(what: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(v, str) for v in given):
        raise InvalidInput(f"{what}={given!r} is not allowed; expected a list of names")
    return tuple(given)


def _sort_segments(segments: Sequence[Segment], inputs: Mapping[str, str]) -> tuple[Segment, ...]:
    """Return `segments` sorted so that values are computed before they are read, otherwise in the given order."""
    known = [*inputs, *{value for segment in segments for value in segment.outputs}]
    for segment in segments:
        check_names(f"value read by segment {segment.name!r}:", known, *segment.inputs)
    there, left, order = set(inputs), list(segments), []
    while left:
        ready = next((s for s in left if there.issuperset(s.inputs)), None)
        if ready is None:
            waiting = _find_cycle(left)
            if len(waiting) == 1:
                raise InvalidInput(f"segment {waiting[0]} reads what it returns: a cycle")
            raise InvalidInput(f"segments {', '.join(waiting)} wait for one another: a cycle")
        order.append(ready)
        left.remove(ready)
        there.update(ready.outputs)
    return tuple(order)


def _find_cycle(segments: Sequence[Segment]) -> list[str]:
    """Return the names of those `segments` that are on a cycle or between two, without those that only follow one."""
    left = list(segments)
    while True:
        read = {value for segment in left for value in segment.inputs}
        kept = [segment for segment in left if read.intersection(segment.outputs)]
        if len(kept) == len(left):
            return [repr(segment.name) for segment in left]
        left = kept
