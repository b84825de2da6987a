"""What is told of a study first, without torch: its tables, their keys, and the names of the pieces they choose.

All of that is told together. What is inside a piece, its parameters and their values, is told together once these are
right, by `splitfed.study.config.grid`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from splitfed.core.errors import unknown
from splitfed.registry import SINGULAR, TABLES
from splitfed.study.config import schema
from splitfed.study.config.mistakes import InvalidStudy, Mistakes, in_file_order
from splitfed.study.config.values import TABLES as MOST

NAMING: Mapping[str, str] = {
    "data": "data",
    "model": "models",
    "topology": "topologies",
    "method": "methods",
    "defense": "defenses",
    "attack": "attacks",
}
"""Table -> the kind of algorithm that it names."""

WITHOUT = ("methods", "defenses")
"""Kinds of which a study may have "none"."""


def check_file(path: Path) -> None:
    """Refuse the study in the file `path` for what can be told without torch; raises `InvalidInput`."""
    check_tables(schema.read_toml(path), path.name)


def check_tables(raw: Mapping[str, Any], source: str) -> None:
    """Raise `InvalidStudy` with all that is wrong with tables, their keys and names of pieces of the study `raw`."""
    searched = "search" in raw
    first = {key: value if key == "search" else _first_option(value) for key, value in raw.items()}
    with in_file_order(raw):
        mistakes = Mistakes(source)
        try:
            schema.parse_study(first if searched else raw, source)
        except InvalidStudy as error:
            mistakes.take_lines(error.lines, error.more)
        for where, kind, name in _names({key: _all_options(table) for key, table in raw.items()} if searched else raw):
            # With a colon or a dot it is meant for a file of the user's.
            own = ":" in name or "." in name
            known = [*TABLES[kind], *(["none"] if kind in WITHOUT and ".combine[" not in where else [])]
            if not own and name not in known:
                mistakes.add(where, unknown(SINGULAR[kind], name, known))
        mistakes.stop()


def _names(raw: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield where a piece is named, its kind, and the name."""
    for key, kind in NAMING.items():
        given = raw.get(key)
        too_many = isinstance(given, list) and len(given) > MOST
        for where, table in () if too_many else _tables(key, given):
            parts = table.get("combine")
            named = _tables(f"{where}.combine", parts) if isinstance(parts, list) else [(where, table)]
            yield from ((f"{at}.name", kind, one["name"]) for at, one in named if isinstance(one.get("name"), str))
            if kind == "topologies":
                yield from _models(where, table)
    training = raw.get("training")
    schedules = training.get("schedule") if isinstance(training, Mapping) else None
    for where, one in _entries("training.schedule", schedules):
        name = one.get("name") if isinstance(one, Mapping) else one
        if isinstance(name, str):
            yield f"{where}.name", "schedules", name


def _models(where: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the models that a topology's table names, at whatever depth."""
    for key, one in value.items() if isinstance(value, Mapping) else ():
        for at, inner in _entries(f"{where}.{key}", one):
            if key == "model" and isinstance(inner, str):
                yield at, "models", inner
            elif isinstance(inner, Mapping):
                yield from _models(at, inner)


def _tables(where: str, given: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield place and content of every table in `given`; what is none is left to the schema."""
    return ((at, one) for at, one in _entries(where, given) if isinstance(one, Mapping))


def _entries(where: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield `given`, or where it is a list its entries, with their places."""
    if isinstance(given, list):
        yield from ((f"{where}[{i}]", one) for i, one in enumerate(given))
    else:
        yield where, given


def _first_option(value: Any) -> Any:
    """Return `value` with the low end for every range and the first option for every choice in it."""
    if isinstance(value, list):
        return [_first_option(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(options := value.get("choice"), list) and options:
        return _first_option(options[0])
    if "low" in value and not isinstance(value["low"], (Mapping, list)):
        return value["low"]
    return {key: _first_option(one) for key, one in value.items()}


def _all_options(value: Any) -> Any:
    """Return `value` with a list of all options for every choice in it."""
    if isinstance(value, list):
        return [_all_options(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(options := value.get("choice"), list):
        return _all_options(options)
    return {key: _all_options(one) for key, one in value.items()}
