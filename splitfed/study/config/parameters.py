"""Checks parameters written in TOML against the signature of the algorithm they are meant for."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from splitfed.core.annealing import EXAMPLE, Annealing
from splitfed.core.errors import unknown
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.schema import LIMIT

T = TypeVar("T")

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "text"}
_WORDS |= {Annealing: f"a course such as {EXAMPLE}"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of an algorithm: its type as written, and its default where it has one."""

    name: str
    hint: Any
    default: Any

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is inspect.Parameter.empty

    def takes(self, value: Any) -> bool:
        """Return whether `value`, as TOML gives it, is of the parameter's type."""
        try:
            TypeAdapter(self.hint).validate_json(json.dumps(value), strict=True)
        except PydanticSchemaGenerationError:
            return True
        except (ValidationError, TypeError):
            return False
        return True


def parameters_of(algorithm: Callable[..., Any], hidden: Collection[str] = ()) -> dict[str, Parameter]:
    """Return the parameters of a function or dataclass by name, without those that are `hidden`."""
    hints = get_type_hints(algorithm)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: Parameter(name, hints.get(name, Any), p.default)
        for name, p in inspect.signature(algorithm).parameters.items()
        if p.kind in named and name not in hidden
    }


@dataclass(frozen=True)
class GridPoint:
    """One value of a part of a study: `full` with every default, and what of it is worth telling."""

    full: Any
    in_label: Any


@dataclass(frozen=True)
class Choice:
    """A part of a study as written, with defaults and lists, and every point of its grid; none after a mistake."""

    written: Any
    points: tuple[GridPoint, ...] = ()


NOTHING = Choice({}, (GridPoint({}, {}),))
"""The choice that there is in a table without keys."""


def check_parameters(
    mistakes: Mistakes,
    where: str,
    allowed: Mapping[str, Parameter],
    values: Mapping[str, Any],
    *,
    keys: Sequence[str] = (),
    grid: bool = False,
    base: Path | None = None,
    apart: str = "",
) -> Choice:
    """Note every parameter of `values` that is unknown, missing or of another type; return the choice that is left.

    `keys`: what else may stand in the table, for the hint. `grid`: a list of values in place of one value makes a
    grid. `base`: the folder that relative paths start from. `apart`: what to do in place of such a list where there is
    no grid.
    """
    written: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    with mistakes.part() as own:
        for name in values:
            if name not in allowed:
                own.add(f"{where}.{name}", unknown("key", name, [*keys, *allowed]))
        for name, parameter in allowed.items():
            if name not in values:
                if parameter.required:
                    own.add(f"{where}.{name}", f"is missing; expected {describe_type(parameter.hint)}")
                elif _is_plain(parameter.default):
                    written[name] = _tuples_to_lists(parameter.default)
                continue
            value = values[name] if base is None else _absolute_path(values[name], parameter.hint, base)
            written[name] = value
            if parameter.takes(value):
                axes[name] = [value]
            elif grid and isinstance(value, list) and len(value) > LIMIT:
                own.add(f"{where}.{name}", f"has {len(value)} entries; at most {LIMIT} are allowed")
            elif grid and isinstance(value, list) and value and all(map(parameter.takes, value)):
                axes[name] = value
            else:
                expected = f"{describe_type(parameter.hint)}{', or a list of those' if grid else ''}"
                if apart and isinstance(value, list) and value and all(map(parameter.takes, value)):
                    expected += f"; {apart}"
                own.add(f"{where}.{name}", f"{short_repr(value)} is not allowed; expected {expected}")
    if own:
        return Choice(written)
    # What stands in a list varies slowest for the parameter written first.
    values_of_points = combinations(mistakes, where, list(axes.values()))
    points = (written | dict(zip(axes, point, strict=True)) for point in values_of_points)
    return Choice(written, tuple(GridPoint(point, label_parameters(allowed, point)) for point in points))


def label_parameters(allowed: Mapping[str, Parameter], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of `point` worth telling: required ones, and those changed."""
    return {
        key: value
        for key, value in point.items()
        if allowed[key].required or lists_to_tuples(value) != allowed[key].default
    }


def combine_choices(mistakes: Mistakes, where: str, parts: Mapping[str, Choice], plain: Choice = NOTHING) -> Choice:
    """Return every combination of the points of `parts`, which stand under their keys beside what `plain` holds."""
    points = [
        GridPoint(
            first.full | {key: one.full for key, one in zip(parts, chosen, strict=True)},
            first.in_label | {key: one.in_label for key, one in zip(parts, chosen, strict=True)},
        )
        for first, *chosen in combinations(mistakes, where, [plain.points, *(part.points for part in parts.values())])
    ]
    return Choice(plain.written | {key: part.written for key, part in parts.items()}, tuple(points))


def combinations(mistakes: Mistakes, where: str, axes: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """Return every choice of one value of each of `axes`, the first varying slowest; note a grid that is too large."""
    if (count := math.prod(map(len, axes))) > LIMIT:
        mistakes.add(where, f"the lists make {count} combinations; at most {LIMIT} are allowed")
        return iter(())
    return itertools.product(*axes)


def describe_type(hint: Any) -> str:
    """Return the type `hint` in words."""
    if hint in _WORDS:
        return _WORDS[hint]
    if get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in get_args(hint))
    if get_origin(hint) in (tuple, list, Sequence):
        inner = dict.fromkeys(describe_type(a) for a in get_args(hint) if a is not ...)
        return f"a list ({', '.join(inner)})"
    if get_origin(hint) in (dict, Mapping):
        return f"a table with {describe_type(get_args(hint)[1])} for each key"
    options = [a for a in get_args(hint) if a in _WORDS or (a is not NoneType and not inspect.isclass(a))]
    return " or ".join(dict.fromkeys(map(describe_type, options))) or "a value of its type"


def holds_type(hint: Any, kind: type) -> bool:
    """Return whether a parameter with this hint may be a `kind`."""
    return kind in _flatten_hint(hint)


def lists_to_tuples(value: Any) -> Any:
    """Return lists, which is all that TOML knows, and lists inside them, as tuples, which frozen values hold."""
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def _tuples_to_lists(value: Any) -> Any:
    return [_tuples_to_lists(v) for v in value] if isinstance(value, tuple) else value


def _absolute_path(value: Any, hint: Any, base: Path) -> Any:
    if not holds_type(hint, Path) or not isinstance(value, str):
        return value
    return str(Path(value) if value.startswith("~") else base / value)


def _flatten_hint(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint):
        yield from _flatten_hint(inner)
