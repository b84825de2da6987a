"""The `[[defense]]` tables of a study: one defense, several in a stated order, or none; lists give a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.core.defense import Defense, Strength
from splitfed.core.errors import unknown
from splitfed.study.config.build import construct
from splitfed.study.config.cell import DefenseSetting, NamedAlgorithm
from splitfed.study.config.lookup import can_construct, look_up_algorithm, take_name
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.parameters import combinations
from splitfed.study.config.schema import DefenseTable

Table = dict[str, Any]


def expand_table(
    mistakes: Mistakes, where: str, table: DefenseTable
) -> tuple[Table, list[tuple[Table, DefenseSetting]]]:
    """Return the table with defaults, and every setting of its grid with the table that means it alone."""
    if table.combine is not None:
        for key in [*table.extra, *(["name"] if table.name is not None else [])]:
            mistakes.add(f"{where}.{key}", "is not allowed beside combine; put it into one of its tables")
        return _expand_combined(mistakes, where, table.combine)
    if table.name == "none":
        for key in table.extra:
            mistakes.add(f"{where}.{key}", unknown("key", key, ["name"]))
        return {"name": "none"}, [({"name": "none"}, _defense_setting(where, []))]
    given = {**({} if table.name is None else {"name": table.name}), **table.extra}
    written, found = _expand_part(mistakes, where, given)
    return written, [(point, _defense_setting(where, [part])) for point, part in found]


def _expand_combined(
    mistakes: Mistakes, where: str, tables: Sequence[Mapping[str, Any]]
) -> tuple[Table, list[tuple[Table, DefenseSetting]]]:
    parts = [_expand_part(mistakes, f"{where}.combine[{i}]", table) for i, table in enumerate(tables)]
    varied = [len({_strength(part) for _, part in found}) > 1 for _, found in parts]
    points = [
        ({"combine": [point for point, _ in chosen]}, _defense_setting(where, [part for _, part in chosen], varied))
        for chosen in combinations(mistakes, where, [found for _, found in parts])
    ]
    return {"combine": [written for written, _ in parts]}, points


def _expand_part(
    mistakes: Mistakes, where: str, given: Mapping[str, Any]
) -> tuple[Table, list[tuple[Table, NamedAlgorithm]]]:
    """Return one defense as written, and at every point of its grid."""
    name, rest = take_name(mistakes, where, given)
    if name is None:
        return {}, []
    written, points = look_up_algorithm(mistakes, where, "defenses", name, rest, grid=True)
    fitting = [point for point in points if can_construct(mistakes, where, "defenses", point)]
    return {"name": name, **written}, [({"name": name, **point.parameters}, point) for point in fitting]


def _defense_setting(where: str, parts: Sequence[NamedAlgorithm], varied: Sequence[bool] = ()) -> DefenseSetting:
    """Strength is that of the first part in which it is `varied` over the grid, or else of the first that has one."""
    strengths = [_strength(part) for part in parts]
    order = sorted(range(len(parts)), key=lambda i: not (varied and varied[i]))
    chosen = next((i for i in order if strengths[i] is not None), None)
    strong = None if chosen is None else strengths[chosen]
    if chosen is not None and strong is not None and len(parts) > 1:
        # Two parts may have a parameter of the same name.
        strong = strong._replace(name=f"{parts[chosen].name} {strong.name}")
    built: list[Defense] = [construct("defenses", part) for part in parts]
    guarantee = "; ".join(dict.fromkeys(defense.guarantee for defense in built)) or "no formal guarantee"
    return DefenseSetting(where, tuple(parts), strong, guarantee)


def _strength(part: NamedAlgorithm) -> Strength | None:
    defense: Defense = construct("defenses", part)
    return defense.strength
