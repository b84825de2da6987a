"""Tables of the pieces of a model, which stand for a parameter of a topology or a method.

A piece is `{model = "mlp", hidden = [16], width = 8}`: a registered model or "package.module:Name", its parameters, and
how many values a row it returns, which the last piece has from the labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter as Signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from torch import nn

from splitfed.core.topology import Head, Segment
from splitfed.registry import EXTENSIONS
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import short_repr
from splitfed.study.config.values import Parameter, holds_type, parameters_of, read_parameters

# What the runner itself passes to a builder, so a study cannot.
HIDDEN = {
    "topologies": ("model", "task", "example", *EXTENSIONS["computations"]),
    "models": ("shape", "outputs", "seed"),
}

EVERY_PARTY = "bottoms"
"""The one parameter of which a single table may stand for all parties, for the data names them."""

SEVERAL = ", or a list of those"
"""What is said of a list in the place of one value, where it spans a grid."""

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


def check_pieces(reader: StudyReader, where: str, kind: str, value: Any) -> None:
    """Note what is wrong with the tables of this `kind` that stand for a parameter."""
    if kind in ("segments", "heads"):
        if isinstance(value, list) and value:
            for i, table in enumerate(value):
                _check_table(reader, f"{where}[{i}]", kind, table)
            return
    elif isinstance(value, Mapping) and (value or kind == "piece"):
        if kind == "piece" or (is_one_piece(value) and where.endswith(f".{EVERY_PARTY}")):
            _check_table(reader, where, "piece", value)
        elif is_one_piece(value):
            reader.mistakes.add(where, f"is one piece; expected {EXPECTED[kind]}")
        else:
            for role, table in value.items():
                check_pieces(reader, f"{where}.{role}", "piece", table)
        return
    lists = ", or a list of those" if isinstance(value, list) and kind in ("piece", "roles") else ""
    reader.mistakes.add(where, f"{short_repr(value)} is not allowed; expected {EXPECTED[kind]}{lists}")


def is_one_piece(value: Mapping[str, Any]) -> bool:
    """Return whether a table is that of one piece, and not of pieces by role."""
    return isinstance(value.get("model"), str) or not any(isinstance(one, (Mapping, list)) for one in value.values())


def parameters_of_piece(
    reader: StudyReader, where: str, kind: str, table: Mapping[str, Any]
) -> dict[str, Parameter] | None:
    """Return what the table of a "piece", or an entry of "segments" or "heads", may hold.

    None where its model is not known, as is noted. The parameters of an import path are the factory's, which is not
    imported before the study is put together.
    """
    if kind == "heads":
        return _fields(Head, "task", "role")
    around = _fields(Segment, "module", "outputs") if kind == "segments" else {}
    if "fusion" in table and around:
        return {**around, "fusion": Parameter("fusion", str, Signature.empty)}
    allowed = {**around, "model": Parameter("model", str, Signature.empty)}
    width = {"width": Parameter("width", int, None)}
    name = table.get("model")
    if not isinstance(name, str):
        wrong = "is missing; add model = ..." if name is None else f"{short_repr(name)} is not allowed; expected text"
        reader.mistakes.add(f"{where}.model", wrong)
        return None
    if ":" in name:
        return allowed | {key: Parameter(key, Any, None) for key in table if key not in allowed} | width
    if (factory := reader.find(f"{where}.model", "models", name)) is None:
        return None
    # Files are read for [model] alone, whose paths start from the study and are looked at before they are trusted.
    found = parameters_of(factory, HIDDEN["models"]).items()
    return allowed | {key: parameter for key, parameter in found if not holds_type(parameter.hint, Path)} | width


def _check_table(reader: StudyReader, where: str, kind: str, table: Any) -> None:
    if not isinstance(table, Mapping):
        reader.mistakes.add(where, f"{short_repr(table)} is not allowed; expected a table")
    elif (allowed := parameters_of_piece(reader, where, kind, table)) is not None:
        read_parameters(reader.mistakes, where, allowed, table, lists=SEVERAL)


def _fields(kind: type[Segment | Head], hidden: str, optional: str) -> dict[str, Parameter]:
    """Return the fields of `kind` without the `hidden` one; the `optional` one need not be given."""
    allowed = parameters_of(kind, (hidden,))
    return {**allowed, optional: replace(allowed[optional], default=None)}
