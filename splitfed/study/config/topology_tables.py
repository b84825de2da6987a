"""The `[[topology]]` tables of a study: a builder's plain parameters, and tables of the pieces of a model.

A piece is `{model = "mlp", hidden = [16], width = 8}`: a registered model or "package.module:Name", its parameters, and
how many values a row it returns, which the last piece has from the labels. A list where one value or one table
belongs gives a grid, at any depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter as Signature
from typing import Any, get_args

from splitfed.core.errors import unknown
from splitfed.core.topology import Head, Segment
from splitfed.registry import TABLES, load
from splitfed.study.config.cell import Named, Placed
from splitfed.study.config.lookup import HIDDEN, checked, find, telling
from splitfed.study.config.mistakes import Mistakes, shown
from splitfed.study.config.parameters import Parameter, combinations, nested, parameters_of
from splitfed.study.config.schema import TopologyTable

EVERY_PARTY = "bottoms"
"""The one parameter of which a single table may stand for all parties, for the data names them."""


@dataclass(frozen=True)
class TopologyPoint:
    """One value of a parameter: `full` with every default, and what of it is worth telling."""

    full: Any
    told: Any


@dataclass(frozen=True)
class Choice:
    """A parameter as written, with defaults and lists, and every point of its grid; none after a mistake."""

    written: Any
    points: tuple[TopologyPoint, ...] = ()


def settings(
    mistakes: Mistakes, where: str, table: TopologyTable
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Placed]]]:
    """Return the table with defaults, and every setting of its grid with the table that means it alone."""
    if table.name not in TABLES["topologies"]:
        find(mistakes, where, "topologies", table.name, {})
        return {"name": table.name}, []
    allowed = parameters_of(load("topologies", table.name), HIDDEN["topologies"])
    kinds = {key: kind for key, p in allowed.items() if (kind := _kind(p, table.extra.get(key))) is not None}
    own = mistakes.fresh()
    plain = {key: _plain(p) for key, p in allowed.items() if key not in kinds}
    given = {key: value for key, value in table.extra.items() if key not in kinds}
    found = checked(own, where, plain, given, keys=list(kinds), grid=True)
    choices: dict[str, Choice] = {}
    for key, kind in kinds.items():
        if key in table.extra:
            choices[key] = _choice(own, f"{where}.{key}", kind, table.extra[key])
        elif allowed[key].required:
            own.add(f"{where}.{key}", f"is missing; expected {EXPECTED[kind]}")
    mistakes.take(own)
    written = found.written | {key: choice.written for key, choice in choices.items()}
    points = []
    axes: list[Sequence[Any]] = [found.points if not own else (), *(choice.points for choice in choices.values())]
    for point, *chosen in combinations(mistakes, where, axes):
        full = point | {key: one.full for key, one in zip(choices, chosen, strict=True)}
        told = telling(plain, point) | {key: one.told for key, one in zip(choices, chosen, strict=True)}
        named = Named(table.name, _ordered(allowed, full), _ordered(allowed, told))
        points.append(({"name": table.name, **named.parameters}, Placed(where, named)))
    return {"name": table.name, **_ordered(allowed, written)}, points


def cuts_a_model(name: str) -> bool:
    """Tell whether the topology `name` takes the one model of `[model]`."""
    return "model" in parameters_of(load("topologies", name))


def piece(mistakes: Mistakes, where: str, value: Any) -> Choice:
    """Check a parameter that the table of one piece stands for, or a list of them."""
    return _choice(mistakes, where, "piece", value)


EXPECTED = {
    "piece": "a table {model = ..., ...}",
    "roles": "a table {role = {model = ..., ...}, ...}",
    "segments": "tables, each with name, role, inputs and model or fusion",
    "heads": "tables, each with value and labels",
}


def _kind(parameter: Parameter, value: Any) -> str | None:
    """Return which tables stand for the parameter; None for a plain value, a fusion's name for instance."""
    kind = nested(parameter.hint)
    texts = value if isinstance(value, list) else [value]
    either = kind == "piece" and str in get_args(parameter.hint)
    return None if either and (value is None or any(isinstance(text, str) for text in texts)) else kind


def _plain(parameter: Parameter) -> Parameter:
    """Return the parameter as TOML can give it: of a name or a module the name; no null among targets."""
    if nested(parameter.hint) is not None:
        return replace(parameter, hint=str)
    return replace(parameter, default=None) if parameter.name == "targets" else parameter


def _choice(mistakes: Mistakes, where: str, kind: str, value: Any) -> Choice:
    """Check one parameter that tables stand for."""
    if kind in ("segments", "heads"):
        return _each(mistakes, where, _segment if kind == "segments" else _head, kind, value)
    if isinstance(value, list):
        several = [_choice(mistakes, f"{where}[{i}]", kind, item) for i, item in enumerate(value)]
        if not several or any(isinstance(item, list) for item in value):
            mistakes.add(where, f"{shown(value)} is not allowed; expected {EXPECTED[kind]}, or a list of those")
        return Choice([one.written for one in several], tuple(point for one in several for point in one.points))
    if not isinstance(value, Mapping) or (kind == "roles" and not value):
        mistakes.add(where, f"{shown(value)} is not allowed; expected {EXPECTED[kind]}")
        return Choice(value)
    if kind == "piece":
        return _piece(mistakes, where, value)
    if isinstance(value.get("model"), str) or not any(isinstance(part, (Mapping, list)) for part in value.values()):
        if where.endswith(f".{EVERY_PARTY}"):
            return _piece(mistakes, where, value)
        mistakes.add(where, f"is one piece; expected {EXPECTED[kind]}")
        return Choice(value)
    parts = {role: _choice(mistakes, f"{where}.{role}", "piece", table) for role, table in value.items()}
    return _together(mistakes, where, parts)


def _each(mistakes: Mistakes, where: str, read: Any, kind: str, value: Any) -> Choice:
    """Check a list of tables one by one with `read`; the grid is that of all of them together."""
    if not isinstance(value, list) or not value:
        mistakes.add(where, f"{shown(value)} is not allowed; expected {EXPECTED[kind]}")
        return Choice(value)
    parts = {}
    for i, table in enumerate(value):
        if isinstance(table, Mapping):
            parts[str(i)] = read(mistakes, f"{where}[{i}]", table)
        else:
            mistakes.add(f"{where}[{i}]", f"{shown(table)} is not allowed; expected a table")
    found = _together(mistakes, where, parts)
    points = tuple(TopologyPoint(list(p.full.values()), list(p.told.values())) for p in found.points)
    return Choice(list(found.written.values()), points)


def _together(mistakes: Mistakes, where: str, parts: Mapping[str, Choice]) -> Choice:
    """Return every combination of the points of `parts`."""
    points = tuple(
        TopologyPoint(
            {key: one.full for key, one in zip(parts, chosen, strict=True)},
            {key: one.told for key, one in zip(parts, chosen, strict=True)},
        )
        for chosen in combinations(mistakes, where, [part.points for part in parts.values()])
    )
    return Choice({key: part.written for key, part in parts.items()}, points)


def _piece(
    mistakes: Mistakes, where: str, table: Mapping[str, Any], around: Mapping[str, Parameter] | None = None
) -> Choice:
    """Check the table of one piece; `around` are the keys that it has besides."""
    allowed = {**(around or {}), "model": Parameter("model", str, Signature.empty)}
    width = {"width": Parameter("width", int, None)}
    name, rest = table.get("model"), {}
    if isinstance(name, str) and ":" in name:
        # The parameters are the factory's, which is not imported before the study is put together.
        rest = {key: value for key, value in table.items() if key not in {**allowed, **width}}
    elif isinstance(name, str):
        if name not in TABLES["models"]:
            mistakes.add(f"{where}.model", unknown("model", name, TABLES["models"]))
            return Choice(table)
        allowed |= parameters_of(load("models", name), HIDDEN["models"])
    elif name is not None:
        mistakes.add(f"{where}.model", f"{shown(name)} is not allowed; expected text")
        return Choice(table)
    else:
        mistakes.add(f"{where}.model", "is missing; add model = ...")
        return Choice(table)
    allowed |= width
    found = checked(mistakes, where, allowed, {k: v for k, v in table.items() if k not in rest}, grid=True)
    return Choice(
        found.written | rest, tuple(TopologyPoint(p | rest, telling(allowed, p) | rest) for p in found.points)
    )


def _segment(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Choice:
    around = {key: replace(p, default=None) if key == "outputs" else p for key, p in _fields(Segment, "module").items()}
    if "fusion" not in table:
        return _piece(mistakes, where, table, around)
    allowed = {**around, "fusion": Parameter("fusion", str, Signature.empty)}
    found = checked(mistakes, where, allowed, table, grid=True)
    return Choice(found.written, tuple(TopologyPoint(p, telling(allowed, p)) for p in found.points))


def _head(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Choice:
    allowed = {key: replace(p, default=None) if key == "role" else p for key, p in _fields(Head, "task").items()}
    found = checked(mistakes, where, allowed, table, grid=True)
    return Choice(found.written, tuple(TopologyPoint(p, telling(allowed, p)) for p in found.points))


def _fields(kind: type[Segment | Head], hidden: str) -> dict[str, Parameter]:
    return parameters_of(kind, (hidden,))


def _ordered(names: Mapping[str, Any] | Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
