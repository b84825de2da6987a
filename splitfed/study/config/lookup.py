"""Looks an algorithm up by name, checks the parameters written beside it, and constructs it to let it refuse them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from splitfed.core.annealing import course_of
from splitfed.core.errors import InvalidInput, unknown
from splitfed.old_names import current_entry, current_parameters
from splitfed.registry import SINGULAR, TABLES, load
from splitfed.study.config import parameters
from splitfed.study.config.build import as_tuple, construct
from splitfed.study.config.cell import NamedAlgorithm
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.parameters import Parameter, Points, parameters_of

# What the runner itself passes to a builder, so a study cannot.
HIDDEN = {"topologies": ("model", "task"), "models": ("shape", "outputs", "seed")}


def look_up_algorithm(
    mistakes: Mistakes, where: str, kind: str, name: str, values: Mapping[str, Any], *, grid: bool = False
) -> tuple[dict[str, Any], list[NamedAlgorithm]]:
    """Return the parameters of `name` with defaults, and the algorithm at every point of their grid."""
    if current_entry(kind, name) not in TABLES[kind]:
        others = ["none"] if kind in ("defenses", "methods") else []
        mistakes.add(f"{where}.name", unknown(SINGULAR[kind], name, [*TABLES[kind], *others]))
        return {}, []
    allowed = parameters_of(load(kind, name), HIDDEN.get(kind, ()))
    found = check_parameters_strictly(mistakes, where, allowed, current_parameters(kind, values), grid=grid)
    return found.written, [
        NamedAlgorithm(name, point, _label_parameters_of(kind, name, allowed, point)) for point in found.points
    ]


def take_name(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Take the name out of a table; None where it is missing or no text."""
    rest = dict(table)
    name = rest.pop("name", None)
    if name is None:
        mistakes.add(f"{where}.name", "is missing; add name = ...")
    elif not isinstance(name, str):
        mistakes.add(f"{where}.name", f"{short_repr(name)} is not allowed; expected text")
    return (name if isinstance(name, str) else None), rest


def check_parameters_strictly(mistakes: Mistakes, where: str, *args: Any, **options: Any) -> Points:
    """As `parameters.check_parameters`, but without points where there was a mistake."""
    own = mistakes.fresh()
    found = parameters.check_parameters(own, where, *args, **options)
    mistakes.take(own)
    return Points(found.written, ()) if own else found


def can_construct(mistakes: Mistakes, where: str, kind: str, part: NamedAlgorithm) -> bool:
    """Tell whether an algorithm takes its parameters; the one it refuses is put into the place."""
    try:
        construct(kind, part)
    except InvalidInput as error:
        text = str(error)
        blamed = [p for p in part.parameters if f"{p}=" in text] or [p for p in part.parameters if p in text.split()]
        mistakes.add(f"{where}.{blamed[0]}" if blamed else where, error)
        return False
    return True


def first_number(kind: str, name: str, point: Mapping[str, Any]) -> str | None:
    """Return the name of the first parameter of `point` that is a number or a course; None where none is.

    By convention what a defense or a method is known by, so that labels tell it even where it has its default.
    """
    for field in fields(load(kind, name)):
        value = point.get(field.name)
        if isinstance(value, Mapping) and course_of(value) is not None:
            return field.name
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return field.name
    return None


def label_parameters(
    allowed: Mapping[str, Parameter], point: Mapping[str, Any], always: Collection[str] = ()
) -> dict[str, Any]:
    """Return the parameters of `point` worth telling: required ones, those changed, and those in `always`."""
    return {
        key: value
        for key, value in point.items()
        if allowed[key].required or as_tuple(value) != allowed[key].default or key in always
    }


def _label_parameters_of(
    kind: str, name: str, allowed: Mapping[str, Parameter], point: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is worth telling of `point`; of a defense or a method its first number too."""
    always = first_number(kind, name, point) if kind in ("defenses", "methods") else None
    return label_parameters(allowed, point, () if always is None else (always,))
