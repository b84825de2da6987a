"""The tables of a study that name an algorithm: `[[topology]]`, `[[method]]`, `[[defense]]`, `[[attack]]`, schedules.

A name is a registered one or an import path, "package.module:Name"; beside it stand the algorithm's parameters, one
value each: lists have become tables of their own by then. Where a topology or a method takes a model of its own, a
table of a piece stands for it: `meme = {model = "mlp", hidden = [8]}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from splitfed.aggregation.base import AggregationRule
from splitfed.core.annealing import annealing_of
from splitfed.core.defense import Defense, Strength
from splitfed.core.errors import unknown
from splitfed.core.secure_computation import SecureComputation
from splitfed.core.topology import Topology
from splitfed.registry import CONTRACTS, EXTENSIONS, resolve
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.piece_tables import EXPECTED, HIDDEN, SEVERAL, check_pieces, plain_parameter, table_kind
from splitfed.study.config.run_spec import (
    COMPUTATION,
    AlgorithmSetting,
    AttackSetting,
    ComputationSetting,
    DefenseSetting,
    NamedAlgorithm,
    slug,
)
from splitfed.study.config.schema import AttackTable, keys_of
from splitfed.study.config.training_attacks import training_role
from splitfed.study.config.values import Parameter, holds_type, lists_to_tuples, parameters_of, read_parameters
from splitfed.threats.recorded_training import reads_training
from splitfed.threats.repeated_releases import check_releases

Table = Mapping[str, Any]

UNTOLD = ("protocol", "key_folder", "accept_leak")
"""Fields of a computation that stand in no label: where keys lie does not tell two settings apart."""


def read_setting(reader: StudyReader, kind: str, where: str, table: Table) -> AlgorithmSetting | None:
    """Return the topology, schedule or method of `table`; None after a mistake."""
    if table.get("name") == "none" and kind == "methods":
        _refuse_parameters(reader, where, table)
        return AlgorithmSetting(where)
    found = read_algorithm(reader, where, kind, table)
    return None if found is None else AlgorithmSetting(where, (found,))


def read_defense(reader: StudyReader, where: str, table: Table) -> list[NamedAlgorithm] | None:
    """Return the defenses of `table`, in the order they act; None after a mistake."""
    if (combined := table.get("combine")) is None:
        if table.get("name") == "none":
            return _refuse_parameters(reader, where, table)
        combined, places = [table], [where]
    else:
        for key in table:
            if key != "combine":
                reader.mistakes.add(f"{where}.{key}", "is not allowed beside combine; put it into one of its tables")
        places = [f"{where}.combine[{i}]" for i in range(len(combined))]
    parts = [read_algorithm(reader, place, "defenses", one) for place, one in zip(places, combined, strict=True)]
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None


def defense_settings(where: str, points: Sequence[Sequence[NamedAlgorithm]]) -> list[DefenseSetting]:
    """Return the settings of the tables that the lists of one make; each has the same number of parts.

    Strength is that of the first part in which it varies over them, or else of the first that has one.
    """
    varied = [len({_strength(part) for part in parts}) > 1 for parts in zip(*points, strict=True)]
    return [_defense_setting(where, parts, varied) for parts in points]


def read_computation(reader: StudyReader, base: Path, where: str, table: Table) -> ComputationSetting | None:
    """Return how runs are computed by `table`; None after a mistake. A relative `key_folder` starts from `base`."""
    defended, given = table.get("defended", True), {key: one for key, one in table.items() if key != "defended"}
    if table["protocol"] == "none":
        for key in table:
            if key != "protocol" and (key != "defended" or not defended):
                reader.mistakes.add(f"{where}.{key}", unknown("key", key, ["protocol"]))
        return ComputationSetting(where)
    kind = computation_class()
    allowed = computation_parameters()
    found = read_parameters(reader.mistakes, where, allowed, given, keys=["defended"], base=base, lists=SEVERAL)
    if found is None:
        return None
    told = {key: value for key, value in label_parameters(allowed, found).items() if key not in UNTOLD}
    with reader.mistakes.blaming(where, found):
        secure = kind(**found).with_key_folder(None)
        part = NamedAlgorithm(COMPUTATION, secure.label, found, told)
        return ComputationSetting(where, (part,), secure, found.get("key_folder"), defended)
    return None


def computation_class() -> type[SecureComputation]:
    """Return the class of secure computations."""
    found: type[SecureComputation] = resolve(EXTENSIONS["computations"][COMPUTATION])
    return found


def computation_parameters() -> dict[str, Parameter]:
    """Return the parameters of a secure computation as TOML gives them: a folder as text, without null."""
    return parameters_of(computation_class()) | {"key_folder": Parameter("key_folder", Path, None)}


def read_attack(reader: StudyReader, where: str, table: AttackTable) -> AttackSetting | None:
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
    given = {"name": name, **table.extra}
    lists = "; attacks span no grid: write an [[attack]] table for each value"
    found = read_algorithm(
        reader, where, "attacks", given, keys=keys_of("attack"), defaults=kind.budgets[budget], lists=lists
    )
    if found is None:
        return None
    if table.releases > 1:
        with reader.mistakes.at(f"{where}.releases"):
            check_releases(name, found.construct(), table.releases)
    if table.round is not None and not reads_training(found.construct()):
        reader.mistakes.add(f"{where}.round", f"is for attacks on recorded training; {name} is on none")
    # Part of the label: what two parties find with the same attack, or from more releases, is never one figure.
    placed = {key: value for key in ("tune", "adversary", "round") if (value := getattr(table, key)) is not None}
    placed |= {"releases": table.releases} if table.releases > 1 else {}
    attack = replace(found, label_values={"budget": budget, **found.label_values, **placed})
    own = table.adversary, role, table.every, table.tune or 0, table.floors, table.releases, table.round
    # What is found with the weights and what without them are two figures, under names that say which is which.
    key = slug("-".join([name, *filter(None, [found.parameters.get("threat_model")])]))
    return AttackSetting(where, key, attack, *own)


def read_algorithm(
    reader: StudyReader,
    where: str,
    kind: str,
    table: Table,
    *,
    keys: Sequence[str] = (),
    base: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    lists: str = SEVERAL,
) -> NamedAlgorithm | None:
    """Return the algorithm of `kind` that `table` names, with its parameters, checked and tried; None after a mistake.

    `keys`, `base` and `lists` are those of `read_parameters`; `defaults` go before the algorithm's own.
    """
    name, values = reader.take_name(where, table)
    if name is None or (factory := reader.find(f"{where}.name", kind, name)) is None:
        return None
    with reader.mistakes.part() as mistakes:
        inner = replace(reader, mistakes=mistakes)
        allowed = {
            key: replace(p, default=(defaults or {}).get(key, p.default))
            for key, p in parameters_of(factory, HIDDEN.get(kind, ())).items()
        }
        foreign = [key for key, p in allowed.items() if key in values and holds_type(p.hint, Topology)]
        for key in foreign:
            mistakes.add(f"{where}.{key}", f"cannot be written in a study; {name} takes it from Python alone")
        tables = {key: of for key, p in allowed.items() if (of := table_kind(p, values.get(key))) is not None}
        flat = {key: plain_parameter(p) for key, p in allowed.items() if key not in tables}
        flat_values = {key: value for key, value in values.items() if key not in (*tables, *foreign)}
        found = read_parameters(mistakes, where, flat, flat_values, keys=[*keys, *tables], base=base, lists=lists)
        for key, of in tables.items():
            if key in values:
                check_pieces(inner, f"{where}.{key}", of, values[key])
            elif allowed[key].required:
                mistakes.add(f"{where}.{key}", f"is missing; expected {EXPECTED[of]}")
        if found is None or mistakes:
            return None
        full = found | {key: values[key] for key in tables if key in values}
        order = allowed if kind == "topologies" else {**flat, **tables}
        full = {key: full[key] for key in order if key in full}
        rules = [key for key, p in flat.items() if holds_type(p.hint, AggregationRule)]
        always = _first_number(factory, full) if kind in ("defenses", "methods") else None
        with mistakes.blaming(where, full):
            objects = {key: rule for key in rules if (rule := reader.find_rules(full.get(key))) is not full.get(key)}
            named = NamedAlgorithm(kind, name, full, label_parameters(allowed, full, always), factory, objects)
            if kind in CONTRACTS:
                replace(named, parameters=found).construct()
            return named
    return None


def label_parameters(
    allowed: Mapping[str, Parameter], full: Mapping[str, Any], always: str | None = None
) -> dict[str, Any]:
    """Return the parameters worth telling: required ones, those changed, and the one told `always`."""
    return {
        key: value
        for key, value in full.items()
        if key == always or allowed[key].required or lists_to_tuples(value) != allowed[key].default
    }


def _first_number(kind: Any, full: Mapping[str, Any]) -> str | None:
    """Return the name of the first parameter in `full` that is a number or a course; None where none is.

    By convention what a defense or a method is known by, so that labels tell it even where it has its default.
    """
    for field in fields(kind):
        value = full.get(field.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number or (isinstance(value, Mapping) and annealing_of(value) is not None):
            return field.name
    return None


def _refuse_parameters(reader: StudyReader, where: str, given: Collection[str]) -> list[NamedAlgorithm]:
    """Note that what is called "none" has no parameters; return that it has no parts."""
    for key in given:
        if key != "name":
            reader.mistakes.add(f"{where}.{key}", unknown("key", key, ["name"]))
    return []


def _defense_setting(where: str, parts: Sequence[NamedAlgorithm], varied: Sequence[bool]) -> DefenseSetting:
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
