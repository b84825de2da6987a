"""From a study's tables to its runs: names looked up, parameters checked and constructed, lists expanded."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from splitfed.attacks.base import Attack
from splitfed.core.errors import unknown
from splitfed.models.import_paths import Code
from splitfed.registry import TABLES, load
from splitfed.study.config import data_table as data_tables
from splitfed.study.config import defense_tables, method_tables, topology_tables
from splitfed.study.config import training_table as training_tables
from splitfed.study.config.build import as_tuple
from splitfed.study.config.cell import Cell, NamedAlgorithm, Probe, Source, slug
from splitfed.study.config.lookup import can_construct, check_parameters_strictly, look_up_algorithm
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.parameters import Parameter, parameters_of
from splitfed.study.config.schema import LIMIT, AttackTable, DataTable, StudyConfig
from splitfed.study.config.training_attacks import TrainingVariant, plan_trainings, training_role


@dataclass(frozen=True)
class Grid:
    """All runs of a study, and the study with every default filled in (as plain TOML tables)."""

    name: str
    resolved: Mapping[str, Any]
    cells: tuple[Cell, ...]


def expand(config: StudyConfig, source: str, base: Path, code: Code | None = None) -> Grid:
    """Return the runs of `config`; relative paths start from `base`. Raises `InvalidStudy` naming every mistake.

    `code`: where import paths of models may lead (default: to classes alone); none is followed here.
    """
    code = Code() if code is None else code
    mistakes = Mistakes(source)
    data_table, data = _parse_data_table(mistakes, config.data, base)
    model_table, model = _parse_model_table(mistakes, config)
    training_table, trained = training_tables.expand_table(mistakes, config.training)
    topologies = [
        topology_tables.expand_table(mistakes, f"topology[{i}]", table) for i, table in enumerate(config.topology)
    ]
    layers = [method_tables.expand_table(mistakes, f"method[{i}]", table) for i, table in enumerate(config.method)]
    defenses = [defense_tables.expand_table(mistakes, f"defense[{i}]", table) for i, table in enumerate(config.defense)]
    attacks = [parse_attack_table(mistakes, f"attack[{i}]", table) for i, table in enumerate(config.attack)]
    mistakes.stop()
    assert data is not None
    placed = [point for _, points in topologies for point in points]
    layered = [point for _, points in layers for point in points]
    guarded = [point for _, points in defenses for point in points]
    probes = [found for found in attacks if found is not None]
    seeds = config.study.seeds
    topology_labels, schedule_labels = [p.builder.label for _, p in placed], [p.schedule.label for _, p in trained]
    _check_distinct(mistakes, {"study.seeds": seeds, "topology": topology_labels, "training.schedule": schedule_labels})
    _check_distinct(mistakes, {"method": [p.label for _, p in layered], "defense": [p.label for _, p in guarded]})
    _check_distinct(mistakes, {"attack": [p.label for p in probes]})
    keyed = tuple(replace(p, key=key) for p, key in zip(probes, _number_repeats([p.key for p in probes]), strict=True))
    worlds = plan_trainings(mistakes, keyed, config.study.honest)
    runs = len(placed) * len(trained) * len(layered) * len(guarded) * len(worlds) * len(seeds)
    if runs > LIMIT:
        mistakes.add("study", f"the grid has {runs} runs; at most {LIMIT} are allowed")
    mistakes.stop()
    resolved: dict[str, Any] = {
        "study": _study_table(config.study.name, seeds, config.study.honest, config.study.target),
        "data": data_table,
        **({} if model is None else {"model": model_table}),
        "training": training_table,
        "topology": [table for table, _ in topologies],
        **({} if [p.part for _, p in layered] == [None] else {"method": [table for table, _ in layers]}),
        "defense": [table for table, _ in defenses],
        "attack": [attack_table(p) for p in probes],
    }
    rows = zip(_number_repeats([point.builder.slug for _, point in placed]), placed, strict=True)
    ways = zip(_number_repeats([plan.schedule.slug for _, plan in trained]), trained, strict=True)
    tiers = zip(_number_repeats([point.slug for _, point in layered]), layered, strict=True)
    columns = zip(_number_repeats([point.slug for _, point in guarded]), guarded, strict=True)
    cells = []
    grid = itertools.product(rows, ways, tiers, columns, worlds, seeds)
    for (first, (where, place)), (way, (training, plan)), (tier, (also, layer)), (second, point), world, seed in grid:
        inside = [] if world.training_attack is None else [f"{world.training_attack.key}-inside"]
        between = [*([way] if len(trained) > 1 else []), *([tier] if len(layered) > 1 else [])]
        name = "--".join([first, *between, second, *inside, f"seed{seed}"])
        cut = model if topology_tables.cuts_model(place.builder.name) else None
        own_tables = {"topology": [where], "method": [also], "defense": [point[0]], "training": training}
        config_alone = _config_alone(resolved, name, seed, world, own_tables, cut is not None)
        more = (world.attacks, config_alone, world.training_attack, layer, config.study.target, code)
        cells.append(Cell(name, seed, data, cut, place, point[1], plan, *more))
    return Grid(config.study.name, resolved, tuple(cells))


def _study_table(name: str, seeds: Sequence[int], honest: bool, target: float | None) -> dict[str, Any]:
    """Return the table `[study]` without what has its default."""
    table: dict[str, Any] = {"name": name, "seeds": list(seeds)}
    return table | ({} if honest else {"honest": False}) | ({} if target is None else {"target": target})


def _config_alone(
    resolved: Mapping[str, Any],
    name: str,
    seed: int,
    world: TrainingVariant,
    own_tables: Mapping[str, Any],
    cuts_model: bool,
) -> dict[str, Any]:
    """Return the study that consists of one run alone, as plain TOML tables."""
    alone = {key: table for key, table in resolved.items() if key != "model" or cuts_model}
    own_name, honest = slug(name).replace("+", "-"), world.training_attack is None
    alone["study"] = _study_table(own_name, [seed], honest, resolved["study"].get("target"))
    alone |= {key: table for key, table in own_tables.items() if key in resolved}
    return {**alone, "attack": [attack_table(p) for p in world.attacks]}


def parse_attack_table(mistakes: Mistakes, where: str, table: AttackTable) -> Probe | None:
    """Return the attack of `table`: the parameters of its budget, changed by those given; or note what is wrong."""
    name = table.name
    if name not in TABLES["attacks"]:
        mistakes.add(f"{where}.name", unknown("attack", name, TABLES["attacks"]))
        return None
    kind: type[Attack] = load("attacks", name)
    budget = kind.usual() if table.budget is None else table.budget
    if budget not in kind.budgets:
        mistakes.add(f"{where}.budget", unknown("budget", budget, kind.budgets))
        return None
    preferred = {k: replace(p, default=kind.budgets[budget].get(k, p.default)) for k, p in parameters_of(kind).items()}
    checked = check_parameters_strictly(mistakes, where, preferred, table.extra, keys=AttackTable.OWN)
    role = training_role(kind)
    if table.every is not None and role == "outside":
        mistakes.add(f"{where}.every", f"is for attacks that live in training; {name} is run once, after it")
    if table.tune is not None and not kind.space:
        mistakes.add(f"{where}.tune", f"{name} has no space of parameters to tune")
    if not checked.points:
        return None
    point = checked.points[0]
    changed = {key: value for key, value in point.items() if as_tuple(value) != preferred[key].default}
    tuned = {} if table.tune is None else {"tune": table.tune}
    # Part of the label: what two parties find with the same attack is never one figure.
    placed = {} if table.adversary is None else {"adversary": table.adversary}
    attack = NamedAlgorithm(name, point, {"budget": budget, **changed, **tuned, **placed})
    if not can_construct(mistakes, where, "attacks", attack):
        return None
    return Probe(where, name, attack.label, attack, table.adversary, role, table.every, table.tune or 0)


def attack_table(probe: Probe) -> dict[str, Any]:
    """Return the `[[attack]]` table that means `probe`."""
    every = {} if probe.every is None else {"every": probe.every}
    return {
        "name": probe.attack.name,
        **probe.attack.label_values,
        **probe.attack.parameters,
        **every,
        "adversary": probe.adversary,
    }


def _parse_data_table(mistakes: Mistakes, table: DataTable, base: Path) -> tuple[dict[str, Any], Source | None]:
    if table.name not in TABLES["data"]:
        mistakes.add("data.name", unknown("data set", table.name, TABLES["data"]))
        return {}, None
    split = {key: getattr(table, key) for key in DataTable.SPLIT if getattr(table, key) is not None}
    keys = [key for key in DataTable.model_fields if key != "name"]
    loader: dict[str, Parameter] = parameters_of(load("data", table.name))
    checked = check_parameters_strictly(mistakes, "data", loader, table.extra, keys=keys, base=base)
    point = checked.points[0] if checked.points else {}
    feature_parts = data_tables.parse_parts(mistakes, table)
    resolved = {"name": table.name, **checked.written, "clients": table.clients, **split, **feature_parts}
    return resolved, Source(table.name, point, table.clients, split, feature_parts)


def _parse_model_table(mistakes: Mistakes, config: StudyConfig) -> tuple[dict[str, Any], NamedAlgorithm | None]:
    cutting = [f"topology[{i}]" for i, t in enumerate(config.topology) if _cuts_model(t.name)]
    if config.model is None:
        if cutting:
            mistakes.add("model", f"is missing; {cutting[0]} cuts a model: add [model] with name = ...")
        return {}, None
    if not cutting and all(table.name in TABLES["topologies"] for table in config.topology):
        mistakes.add("model", "is used by no topology, whose pieces have models in their own tables; leave it out")
    name, given = config.model.name, config.model.extra
    if ":" in name:
        return {"name": name, **given}, NamedAlgorithm(name, given, given)
    found, points = look_up_algorithm(mistakes, "model", "models", name, given)
    return {"name": name, **found}, points[0] if points else None


def _cuts_model(name: str) -> bool:
    return name in TABLES["topologies"] and topology_tables.cuts_model(name)


def _check_distinct(mistakes: Mistakes, given: Mapping[str, Sequence[Any]]) -> None:
    """Note what a place of the study names more than once."""
    for where, values in given.items():
        for value, times in Counter(values).items():
            if times > 1:
                mistakes.add(where, f"{value} is there {times} times; expected once")


def _number_repeats(names: Sequence[str]) -> list[str]:
    """Return `names` with a number at those that came before."""
    counts: dict[str, int] = {}
    result = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        result.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return result
