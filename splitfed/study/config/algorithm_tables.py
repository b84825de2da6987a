"""The tables of a study that name an algorithm: `[[topology]]`, `[[method]]`, `[[defense]]`, `[[attack]]`, schedules.

A name is a registered one or an import path, "package.module:Name"; beside it stand the algorithm's parameters, and a
list in place of one value gives a grid. Where a topology or a method takes a model of its own, a table of a piece
stands for it: `meme = {model = "mlp", hidden = [8]}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from splitfed.aggregation.base import AggregationRule
from splitfed.core.annealing import annealing_of
from splitfed.core.defense import Defense, Strength
from splitfed.core.errors import unknown
from splitfed.core.topology import Topology
from splitfed.registry import CONTRACTS
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.parameters import (
    GridPoint,
    check_parameters,
    combinations,
    combine_choices,
    holds_type,
    parameters_of,
)
from splitfed.study.config.piece_tables import EXPECTED, HIDDEN, expand_pieces, plain_parameter, table_kind
from splitfed.study.config.run_spec import (
    AttackSetting,
    DefenseSetting,
    MethodSetting,
    NamedAlgorithm,
    TopologySetting,
    slug,
)
from splitfed.study.config.schema import AttackTable, DefenseTable, MethodTable, TopologyTable
from splitfed.study.config.training_attacks import training_role
from splitfed.threats.recorded_training import reads_training
from splitfed.threats.repeated_releases import check_releases

Table = dict[str, Any]
Algorithms = tuple[Table, list[NamedAlgorithm]]
"""A table with defaults, lists kept, and the algorithm at every point of its grid; none after a mistake."""


def expand_topology(reader: StudyReader, where: str, table: TopologyTable) -> tuple[Table, list[TopologySetting]]:
    """Return a `[[topology]]` table with defaults, and every setting of its grid."""
    written, builders = expand_algorithm(reader, where, "topologies", table.name, table.extra)
    return written, [TopologySetting(where, builder) for builder in builders]


def expand_method(reader: StudyReader, where: str, table: MethodTable) -> tuple[Table, list[MethodSetting]]:
    """Return a `[[method]]` table with defaults, and every setting of its grid."""
    if table.name == "none":
        _refuse_parameters(reader, where, table.extra)
        return {"name": "none"}, [MethodSetting(where)]
    written, found = expand_algorithm(reader, where, "methods", table.name, table.extra)
    return written, [MethodSetting(where, (part,)) for part in found]


def expand_defense(reader: StudyReader, where: str, table: DefenseTable) -> tuple[Table, list[DefenseSetting]]:
    """Return a `[[defense]]` table with defaults, and every setting of its grid."""
    if table.combine is not None:
        for key in [*table.extra, *(["name"] if table.name is not None else [])]:
            reader.mistakes.add(f"{where}.{key}", "is not allowed beside combine; put it into one of its tables")
        parts = [expand_table(reader, f"{where}.combine[{i}]", "defenses", one) for i, one in enumerate(table.combine)]
        varied = [len({_strength(part) for part in found}) > 1 for _, found in parts]
        chosen = combinations(reader.mistakes, where, [found for _, found in parts])
        return {"combine": [written for written, _ in parts]}, [_defense_setting(where, c, varied) for c in chosen]
    if table.name == "none":
        _refuse_parameters(reader, where, table.extra)
        return {"name": "none"}, [_defense_setting(where, [])]
    given = {**({} if table.name is None else {"name": table.name}), **table.extra}
    written, found = expand_table(reader, where, "defenses", given)
    return written, [_defense_setting(where, [part]) for part in found]


def parse_attack(reader: StudyReader, where: str, table: AttackTable) -> AttackSetting | None:
    """Return the attack of `table`: the parameters of its budget, changed by those given; or note what is wrong."""
    name = table.name
    kind: Any = reader.find(f"{where}.name", "attacks", name)
    if kind is None:
        return None
    budget = kind.usual() if table.budget is None else table.budget
    if budget not in kind.budgets:
        reader.mistakes.add(f"{where}.budget", unknown("budget", budget, kind.budgets))
        return None
    role = training_role(kind)
    if table.every is not None and role == "outside":
        reader.mistakes.add(f"{where}.every", f"is for attacks that live in training; {name} is run once, after it")
    if table.tune is not None and not kind.space:
        reader.mistakes.add(f"{where}.tune", f"{name} has no space of parameters to tune")
    _, found = expand_algorithm(
        reader, where, "attacks", name, table.extra, keys=AttackTable.OWN, defaults=kind.budgets[budget], grid=False
    )
    if not found:
        return None
    if table.releases > 1:
        with reader.mistakes.at(f"{where}.releases"):
            check_releases(name, found[0].construct(), table.releases)
    if table.round is not None and not reads_training(found[0].construct()):
        reader.mistakes.add(f"{where}.round", f"is for attacks on recorded training; {name} is on none")
    # Part of the label: what two parties find with the same attack, or from more releases, is never one figure.
    placed = {key: value for key in ("tune", "adversary", "round") if (value := getattr(table, key)) is not None}
    placed |= {"releases": table.releases} if table.releases > 1 else {}
    attack = replace(found[0], label_values={"budget": budget, **found[0].label_values, **placed})
    own = table.adversary, role, table.every, table.tune or 0, table.floors, table.releases, table.round
    # What is found with the weights and what without them are two figures, under names that say which is which.
    key = slug("-".join([name, *filter(None, [found[0].parameters.get("threat_model")])]))
    return AttackSetting(where, key, attack.label, attack, *own)


def expand_table(reader: StudyReader, where: str, kind: str, table: Mapping[str, Any]) -> Algorithms:
    """Return what `table` names: the table with all defaults, and an algorithm for each point of its grid."""
    name, rest = reader.take_name(where, table)
    return ({}, []) if name is None else expand_algorithm(reader, where, kind, name, rest)


def expand_algorithm(
    reader: StudyReader,
    where: str,
    kind: str,
    name: str,
    values: Mapping[str, Any],
    *,
    keys: Sequence[str] = (),
    grid: bool = True,
    base: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Algorithms:
    """Return the algorithm `name` of `kind` with the parameters `values`, checked and tried.

    `keys`, `grid` and `base` are those of `check_parameters`; `defaults` go before the algorithm's own.
    """
    if (factory := reader.find(f"{where}.name", kind, name)) is None:
        return {"name": name}, []
    mistakes = reader.mistakes
    allowed = {
        key: replace(p, default=(defaults or {}).get(key, p.default))
        for key, p in parameters_of(factory, HIDDEN.get(kind, ())).items()
    }
    foreign = [key for key, p in allowed.items() if key in values and holds_type(p.hint, Topology)]
    for key in foreign:
        mistakes.add(f"{where}.{key}", f"cannot be written in a study; {name} takes it from Python alone")
    tables = {key: of for key, p in allowed.items() if (of := table_kind(p, values.get(key))) is not None}
    plain = {key: plain_parameter(p) for key, p in allowed.items() if key not in tables}
    plain_values = {key: value for key, value in values.items() if key not in (*tables, *foreign)}
    apart = "attacks span no grid: write an [[attack]] table for each value" if kind == "attacks" else ""
    own_keys = [*keys, *tables]
    found = check_parameters(mistakes, where, plain, plain_values, keys=own_keys, grid=grid, base=base, apart=apart)
    pieces = {key: expand_pieces(reader, f"{where}.{key}", tables[key], values[key]) for key in tables if key in values}
    for key in tables:
        if key not in values and allowed[key].required:
            mistakes.add(f"{where}.{key}", f"is missing; expected {EXPECTED[tables[key]]}")
    rules = [key for key, p in plain.items() if holds_type(p.hint, AggregationRule)]
    order = allowed if kind == "topologies" else {**plain, **tables}

    def name_point(point: GridPoint) -> NamedAlgorithm:
        full = {key: point.full[key] for key in order if key in point.full}
        always = _first_number(factory, full) if kind in ("defenses", "methods") else None
        shown = {k: point.in_label.get(k, value) for k, value in full.items() if k in point.in_label or k == always}
        objects = {key: rule for key in rules if (rule := reader.find_rules(full.get(key))) is not full.get(key)}
        return NamedAlgorithm(kind, name, full, shown, factory, objects)

    if kind in CONTRACTS:
        fitting = [point for point in found.points if _can_construct(mistakes, where, point, name_point)]
        found = replace(found, points=tuple(fitting))
    choice = combine_choices(mistakes, where, pieces, found)
    written = {key: choice.written[key] for key in order if key in choice.written}
    return {"name": name, **written}, [name_point(point) for point in choice.points]


def _can_construct(
    mistakes: Mistakes, where: str, point: GridPoint, name_point: Callable[[GridPoint], NamedAlgorithm]
) -> bool:
    """Return whether an algorithm takes its parameters; the one it refuses is put into the place."""
    with mistakes.blaming(where, point.full):
        name_point(point).construct()
        return True
    return False


def _first_number(kind: Any, point: Mapping[str, Any]) -> str | None:
    """Return the name of the first parameter of `point` that is a number or a course; None where none is.

    By convention what a defense or a method is known by, so that labels tell it even where it has its default.
    """
    for field in fields(kind):
        value = point.get(field.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number or (isinstance(value, Mapping) and annealing_of(value) is not None):
            return field.name
    return None


def _refuse_parameters(reader: StudyReader, where: str, given: Collection[str]) -> None:
    """Note that what is called "none" has no parameters."""
    for key in given:
        reader.mistakes.add(f"{where}.{key}", unknown("key", key, ["name"]))


def _defense_setting(where: str, parts: Sequence[NamedAlgorithm], varied: Sequence[bool] = ()) -> DefenseSetting:
    """Strength is that of the first part in which it is `varied` over the grid, or else of the first that has one."""
    first = itertools.compress(parts, varied)
    known = ((part.name, strength) for part in (*first, *parts) if (strength := _strength(part)) is not None)
    name, strong = next(known, ("", None))
    if strong is not None and len(parts) > 1:
        # Two parts may have a parameter of the same name.
        strong = strong._replace(name=f"{name} {strong.name}")
    guarantee = "; ".join(dict.fromkeys(part.construct().guarantee for part in parts)) or "no formal guarantee"
    return DefenseSetting(where, tuple(parts), strong, guarantee)


def _strength(part: NamedAlgorithm) -> Strength | None:
    defense: Defense = part.construct()
    return defense.strength
