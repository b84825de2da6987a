"""The `[[defense]]` tables of a study: one defense, several in a stated order, or none; lists give a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.core.defense import Defense, Strength
from splitfed.core.errors import unknown
from splitfed.study.config.build import made
from splitfed.study.config.cell import Guarded, Named
from splitfed.study.config.lookup import constructs, find, named
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.parameters import combinations
from splitfed.study.config.schema import DefenseTable

Written = dict[str, Any]


def settings(mistakes: Mistakes, where: str, table: DefenseTable) -> tuple[Written, list[tuple[Written, Guarded]]]:
    """Return the table with defaults, and every setting of its grid with the table that means it alone."""
    if table.combine is not None:
        for key in [*table.extra, *(["name"] if table.name is not None else [])]:
            mistakes.add(f"{where}.{key}", "is not allowed beside combine; put it into one of its tables")
        return _combined(mistakes, where, table.combine)
    if table.name == "none":
        for key in table.extra:
            mistakes.add(f"{where}.{key}", unknown("key", key, ["name"]))
        return {"name": "none"}, [({"name": "none"}, _guarded(where, []))]
    given = {**({} if table.name is None else {"name": table.name}), **table.extra}
    written, found = _part(mistakes, where, given)
    return written, [(point, _guarded(where, [part])) for point, part in found]


def _combined(
    mistakes: Mistakes, where: str, tables: Sequence[Mapping[str, Any]]
) -> tuple[Written, list[tuple[Written, Guarded]]]:
    parts = [_part(mistakes, f"{where}.combine[{i}]", table) for i, table in enumerate(tables)]
    varied = [len({_strength(part) for _, part in found}) > 1 for _, found in parts]
    points = [
        ({"combine": [point for point, _ in chosen]}, _guarded(where, [part for _, part in chosen], varied))
        for chosen in combinations(mistakes, where, [found for _, found in parts])
    ]
    return {"combine": [written for written, _ in parts]}, points


def _part(mistakes: Mistakes, where: str, given: Mapping[str, Any]) -> tuple[Written, list[tuple[Written, Named]]]:
    """Return one defense as written, and at every point of its grid."""
    name, rest = named(mistakes, where, given)
    if name is None:
        return {}, []
    written, points = find(mistakes, where, "defenses", name, rest, grid=True)
    fitting = [point for point in points if constructs(mistakes, where, "defenses", point)]
    return {"name": name, **written}, [({"name": name, **point.parameters}, point) for point in fitting]


def _guarded(where: str, parts: Sequence[Named], varied: Sequence[bool] = ()) -> Guarded:
    """Strength is that of the first part in which it is `varied` over the grid, or else of the first that has one."""
    strengths = [_strength(part) for part in parts]
    order = sorted(range(len(parts)), key=lambda i: not (varied and varied[i]))
    chosen = next((i for i in order if strengths[i] is not None), None)
    strong = None if chosen is None else strengths[chosen]
    if chosen is not None and strong is not None and len(parts) > 1:
        # Two parts may have a parameter of the same name.
        strong = strong._replace(name=f"{parts[chosen].name} {strong.name}")
    built: list[Defense] = [made("defenses", part) for part in parts]
    guarantee = "; ".join(dict.fromkeys(defense.guarantee for defense in built)) or "no formal guarantee"
    return Guarded(where, tuple(parts), strong, guarantee)


def _strength(part: Named) -> Strength | None:
    defense: Defense = made("defenses", part)
    return defense.strength
