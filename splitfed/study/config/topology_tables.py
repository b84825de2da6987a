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
from splitfed.study.config.cell import NamedAlgorithm, TopologySetting
from splitfed.study.config.lookup import HIDDEN, check_parameters_strictly, label_parameters, look_up_algorithm
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.parameters import Parameter, combinations, parameters_of, piece_kind
from splitfed.study.config.schema import TopologyTable

EVERY_PARTY = "bottoms"
"""The one parameter of which a single table may stand for all parties, for the data names them."""


@dataclass(frozen=True)
class TopologyPoint:
    """One value of a parameter: `full` with every default, and what of it is worth telling."""

    full: Any
    in_label: Any


@dataclass(frozen=True)
class Choice:
    """A parameter as written, with defaults and lists, and every point of its grid; none after a mistake."""

    written: Any
    points: tuple[TopologyPoint, ...] = ()


def expand_table(
    mistakes: Mistakes, where: str, table: TopologyTable
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], TopologySetting]]]:
    """Return the table with defaults, and every setting of its grid with the table that means it alone."""
    if table.name not in TABLES["topologies"]:
        look_up_algorithm(mistakes, where, "topologies", table.name, {})
        return {"name": table.name}, []
    allowed = parameters_of(load("topologies", table.name), HIDDEN["topologies"])
    kinds = {key: kind for key, p in allowed.items() if (kind := _table_kind(p, table.extra.get(key))) is not None}
    own = mistakes.fresh()
    plain = {key: _plain_parameter(p) for key, p in allowed.items() if key not in kinds}
    plain_values = {key: value for key, value in table.extra.items() if key not in kinds}
    found = check_parameters_strictly(own, where, plain, plain_values, keys=list(kinds), grid=True)
    choices: dict[str, Choice] = {}
    for key, kind in kinds.items():
        if key in table.extra:
            choices[key] = _expand_parameter(own, f"{where}.{key}", kind, table.extra[key])
        elif allowed[key].required:
            own.add(f"{where}.{key}", f"is missing; expected {EXPECTED[kind]}")
    mistakes.take(own)
    written = found.written | {key: choice.written for key, choice in choices.items()}
    points = []
    axes: list[Sequence[Any]] = [found.points if not own else (), *(choice.points for choice in choices.values())]
    for point, *chosen in combinations(mistakes, where, axes):
        full = point | {key: one.full for key, one in zip(choices, chosen, strict=True)}
        in_label = label_parameters(plain, point) | {
            key: one.in_label for key, one in zip(choices, chosen, strict=True)
        }
        named = NamedAlgorithm(table.name, _in_order_of(allowed, full), _in_order_of(allowed, in_label))
        points.append(({"name": table.name, **named.parameters}, TopologySetting(where, named)))
    return {"name": table.name, **_in_order_of(allowed, written)}, points


def cuts_model(name: str) -> bool:
    """Tell whether the topology `name` takes the one model of `[model]`."""
    return "model" in parameters_of(load("topologies", name))


def expand_piece_table(mistakes: Mistakes, where: str, value: Any) -> Choice:
    """Check a parameter that the table of one piece stands for, or a list of them."""
    return _expand_parameter(mistakes, where, "piece", value)


EXPECTED = {
    "piece": "a table {model = ..., ...}",
    "roles": "a table {role = {model = ..., ...}, ...}",
    "segments": "tables, each with name, role, inputs and model or fusion",
    "heads": "tables, each with value and labels",
}


def _table_kind(parameter: Parameter, value: Any) -> str | None:
    """Return which tables stand for the parameter; None for a plain value, a fusion's name for instance."""
    kind = piece_kind(parameter.hint)
    texts = value if isinstance(value, list) else [value]
    either = kind == "piece" and str in get_args(parameter.hint)
    return None if either and (value is None or any(isinstance(text, str) for text in texts)) else kind


def _plain_parameter(parameter: Parameter) -> Parameter:
    """Return the parameter as TOML can give it: of a name or a module the name; no null among targets."""
    if piece_kind(parameter.hint) is not None:
        return replace(parameter, hint=str)
    return replace(parameter, default=None) if parameter.name == "targets" else parameter


def _expand_parameter(mistakes: Mistakes, where: str, kind: str, value: Any) -> Choice:
    """Check one parameter that tables stand for."""
    if kind in ("segments", "heads"):
        return _expand_list(mistakes, where, _expand_segment if kind == "segments" else _expand_head, kind, value)
    if isinstance(value, list):
        several = [_expand_parameter(mistakes, f"{where}[{i}]", kind, item) for i, item in enumerate(value)]
        if not several or any(isinstance(item, list) for item in value):
            mistakes.add(where, f"{short_repr(value)} is not allowed; expected {EXPECTED[kind]}, or a list of those")
        return Choice([one.written for one in several], tuple(point for one in several for point in one.points))
    if not isinstance(value, Mapping) or (kind == "roles" and not value):
        mistakes.add(where, f"{short_repr(value)} is not allowed; expected {EXPECTED[kind]}")
        return Choice(value)
    if kind == "piece":
        return _expand_piece(mistakes, where, value)
    if isinstance(value.get("model"), str) or not any(isinstance(part, (Mapping, list)) for part in value.values()):
        if where.endswith(f".{EVERY_PARTY}"):
            return _expand_piece(mistakes, where, value)
        mistakes.add(where, f"is one piece; expected {EXPECTED[kind]}")
        return Choice(value)
    parts = {role: _expand_parameter(mistakes, f"{where}.{role}", "piece", table) for role, table in value.items()}
    return _combine_choices(mistakes, where, parts)


def _expand_list(mistakes: Mistakes, where: str, read: Any, kind: str, value: Any) -> Choice:
    """Check a list of tables one by one with `read`; the grid is that of all of them together."""
    if not isinstance(value, list) or not value:
        mistakes.add(where, f"{short_repr(value)} is not allowed; expected {EXPECTED[kind]}")
        return Choice(value)
    parts = {}
    for i, table in enumerate(value):
        if isinstance(table, Mapping):
            parts[str(i)] = read(mistakes, f"{where}[{i}]", table)
        else:
            mistakes.add(f"{where}[{i}]", f"{short_repr(table)} is not allowed; expected a table")
    combined = _combine_choices(mistakes, where, parts)
    points = tuple(TopologyPoint(list(p.full.values()), list(p.in_label.values())) for p in combined.points)
    return Choice(list(combined.written.values()), points)


def _combine_choices(mistakes: Mistakes, where: str, parts: Mapping[str, Choice]) -> Choice:
    """Return every combination of the points of `parts`."""
    points = tuple(
        TopologyPoint(
            {key: one.full for key, one in zip(parts, chosen, strict=True)},
            {key: one.in_label for key, one in zip(parts, chosen, strict=True)},
        )
        for chosen in combinations(mistakes, where, [part.points for part in parts.values()])
    )
    return Choice({key: part.written for key, part in parts.items()}, points)


def _expand_piece(
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
        mistakes.add(f"{where}.model", f"{short_repr(name)} is not allowed; expected text")
        return Choice(table)
    else:
        mistakes.add(f"{where}.model", "is missing; add model = ...")
        return Choice(table)
    allowed |= width
    found = check_parameters_strictly(
        mistakes, where, allowed, {k: v for k, v in table.items() if k not in rest}, grid=True
    )
    return Choice(
        found.written | rest, tuple(TopologyPoint(p | rest, label_parameters(allowed, p) | rest) for p in found.points)
    )


def _expand_segment(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Choice:
    around = {key: replace(p, default=None) if key == "outputs" else p for key, p in _fields(Segment, "module").items()}
    if "fusion" not in table:
        return _expand_piece(mistakes, where, table, around)
    allowed = {**around, "fusion": Parameter("fusion", str, Signature.empty)}
    found = check_parameters_strictly(mistakes, where, allowed, table, grid=True)
    return Choice(found.written, tuple(TopologyPoint(p, label_parameters(allowed, p)) for p in found.points))


def _expand_head(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Choice:
    allowed = {key: replace(p, default=None) if key == "role" else p for key, p in _fields(Head, "task").items()}
    found = check_parameters_strictly(mistakes, where, allowed, table, grid=True)
    return Choice(found.written, tuple(TopologyPoint(p, label_parameters(allowed, p)) for p in found.points))


def _fields(kind: type[Segment | Head], hidden: str) -> dict[str, Parameter]:
    return parameters_of(kind, (hidden,))


def _in_order_of(names: Mapping[str, Any] | Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
