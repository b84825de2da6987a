"""Tables of the pieces of a model, which stand for a parameter of a topology or a method.

A piece is `{model = "mlp", hidden = [16], width = 8}`: a registered model or "package.module:Name", its parameters, and
how many values a row it returns, which the last piece has from the labels. A list where one value or one table
belongs gives a grid, at any depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter as Signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from torch import nn

from splitfed.core.topology import Head, Segment
from splitfed.registry import EXTENSIONS
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import short_repr
from splitfed.study.config.parameters import (
    Choice,
    GridPoint,
    Parameter,
    check_parameters,
    combine_choices,
    holds_type,
    parameters_of,
)

# What the runner itself passes to a builder, so a study cannot.
HIDDEN = {
    "topologies": ("model", "task", "example", *EXTENSIONS["computations"]),
    "models": ("shape", "outputs", "seed"),
}

EVERY_PARTY = "bottoms"
"""The one parameter of which a single table may stand for all parties, for the data names them."""

EXPECTED = {
    "piece": "a table {model = ..., ...}",
    "roles": "a table {role = {model = ..., ...}, ...}",
    "segments": "tables, each with name, role, inputs and model or fusion",
    "heads": "tables, each with value and labels",
}


def piece_kind(hint: Any) -> Literal["roles", "piece", "segments", "heads"] | None:
    """Tell which tables of pieces of a model stand for a parameter with this hint; None where a plain value does."""
    if holds_type(hint, Segment):
        return "segments"
    if holds_type(hint, Head):
        return "heads"
    if not holds_type(hint, nn.Module):
        return None
    return "roles" if get_origin(hint) is Mapping else "piece"


def table_kind(parameter: Parameter, value: Any) -> str | None:
    """Return which tables stand for the parameter; None for a plain value, a fusion's name for instance."""
    kind = piece_kind(parameter.hint)
    texts = value if isinstance(value, list) else [value]
    either = kind == "piece" and str in get_args(parameter.hint)
    return None if either and (value is None or any(isinstance(text, str) for text in texts)) else kind


def plain_parameter(parameter: Parameter) -> Parameter:
    """Return the parameter as TOML can give it: of a name or a module the name; no null among targets."""
    if piece_kind(parameter.hint) is not None:
        return replace(parameter, hint=str)
    return replace(parameter, default=None) if parameter.name == "targets" else parameter


def expand_pieces(reader: StudyReader, where: str, kind: str, value: Any) -> Choice:
    """Check one parameter that tables of this `kind` stand for, or a list of them."""
    mistakes = reader.mistakes
    if kind in ("segments", "heads"):
        return _expand_list(reader, where, _expand_segment if kind == "segments" else _expand_head, kind, value)
    if isinstance(value, list):
        several = [expand_pieces(reader, f"{where}[{i}]", kind, item) for i, item in enumerate(value)]
        if not several or any(isinstance(item, list) for item in value):
            mistakes.add(where, f"{short_repr(value)} is not allowed; expected {EXPECTED[kind]}, or a list of those")
        return Choice([one.written for one in several], tuple(point for one in several for point in one.points))
    if not isinstance(value, Mapping) or (kind == "roles" and not value):
        mistakes.add(where, f"{short_repr(value)} is not allowed; expected {EXPECTED[kind]}")
        return Choice(value)
    if kind == "piece":
        return _expand_piece(reader, where, value)
    if isinstance(value.get("model"), str) or not any(isinstance(part, (Mapping, list)) for part in value.values()):
        if where.endswith(f".{EVERY_PARTY}"):
            return _expand_piece(reader, where, value)
        mistakes.add(where, f"is one piece; expected {EXPECTED[kind]}")
        return Choice(value)
    parts = {role: expand_pieces(reader, f"{where}.{role}", "piece", table) for role, table in value.items()}
    return combine_choices(mistakes, where, parts)


def _expand_list(
    reader: StudyReader,
    where: str,
    expand: Callable[[StudyReader, str, Mapping[str, Any]], Choice],
    kind: str,
    value: Any,
) -> Choice:
    """Check a list of tables one by one with `expand`; the grid is that of all of them together."""
    if not isinstance(value, list) or not value:
        reader.mistakes.add(where, f"{short_repr(value)} is not allowed; expected {EXPECTED[kind]}")
        return Choice(value)
    parts = {}
    for i, table in enumerate(value):
        if isinstance(table, Mapping):
            parts[str(i)] = expand(reader, f"{where}[{i}]", table)
        else:
            reader.mistakes.add(f"{where}[{i}]", f"{short_repr(table)} is not allowed; expected a table")
    combined = combine_choices(reader.mistakes, where, parts)
    points = tuple(GridPoint(list(p.full.values()), list(p.in_label.values())) for p in combined.points)
    return Choice(list(combined.written.values()), points)


def _expand_piece(
    reader: StudyReader, where: str, table: Mapping[str, Any], around: Mapping[str, Parameter] | None = None
) -> Choice:
    """Check the table of one piece; `around` are the keys that it has besides."""
    allowed = {**(around or {}), "model": Parameter("model", str, Signature.empty)}
    width = {"width": Parameter("width", int, None)}
    name, rest = table.get("model"), {}
    if not isinstance(name, str):
        wrong = "is missing; add model = ..." if name is None else f"{short_repr(name)} is not allowed; expected text"
        reader.mistakes.add(f"{where}.model", wrong)
        return Choice(table)
    if ":" in name:
        # The parameters are the factory's, which is not imported before the study is put together.
        rest = {key: value for key, value in table.items() if key not in {**allowed, **width}}
    else:
        if (factory := reader.find(f"{where}.model", "models", name)) is None:
            return Choice(table)
        found = parameters_of(factory, HIDDEN["models"])
        # Files are read for [model] alone, whose paths start from the study and are looked at before they are trusted.
        allowed |= {key: parameter for key, parameter in found.items() if not holds_type(parameter.hint, Path)}
    plain = {key: value for key, value in table.items() if key not in rest}
    choice = check_parameters(reader.mistakes, where, allowed | width, plain, grid=True)
    return Choice(choice.written | rest, tuple(GridPoint(p.full | rest, p.in_label | rest) for p in choice.points))


def _expand_segment(reader: StudyReader, where: str, table: Mapping[str, Any]) -> Choice:
    around = _fields(Segment, "module", "outputs")
    if "fusion" not in table:
        return _expand_piece(reader, where, table, around)
    allowed = {**around, "fusion": Parameter("fusion", str, Signature.empty)}
    return check_parameters(reader.mistakes, where, allowed, table, grid=True)


def _expand_head(reader: StudyReader, where: str, table: Mapping[str, Any]) -> Choice:
    return check_parameters(reader.mistakes, where, _fields(Head, "task", "role"), table, grid=True)


def _fields(kind: type[Segment | Head], hidden: str, optional: str) -> dict[str, Parameter]:
    """Return the fields of `kind` without the `hidden` one; the `optional` one need not be given."""
    allowed = parameters_of(kind, (hidden,))
    return {**allowed, optional: replace(allowed[optional], default=None)}
