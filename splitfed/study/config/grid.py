"""From a study's tables to its runs: names looked up, parameters checked and constructed, lists expanded."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from splitfed.attacks.threat_model import OF_COMPUTATIONS
from splitfed.models.import_paths import NameResolver
from splitfed.study.config import client_tables, data_table as data_tables, training_table as training_tables
from splitfed.study.config.algorithm_tables import (
    expand_algorithm,
    expand_defense,
    expand_method,
    parse_attack,
)
from splitfed.study.config.callback_tables import expand_callback
from splitfed.study.config.computation_table import expand_computation
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import (
    COMPUTATION,
    AttackSetting,
    ClientModel,
    ComputationSetting,
    DataSetting,
    DefenseSetting,
    MethodSetting,
    NamedAlgorithm,
    RunSpec,
    TopologySetting,
    TrainingPlan,
    slug,
)
from splitfed.study.config.schema import LIMIT, DataTable, StudyConfig
from splitfed.study.config.training_attacks import TrainingVariant, plan_trainings

T = TypeVar("T")
S = TypeVar("S")

IN_PLAIN = "it reads a layer that computes on ciphertexts, and this run is in plain"
"""Why an attack on a secure computation is left out of a run in plain, beside secured ones."""


@dataclass(frozen=True)
class Grid:
    """All runs of a study, and the study with every default filled in (as plain TOML tables).

    `skip_refused`: whether runs that are refused are left out, as `refused` then has them: name and reason, in pairs.
    """

    name: str
    resolved: Mapping[str, Any]
    cells: tuple[RunSpec, ...]
    skip_refused: bool = False
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _Settings:
    """Every setting that the lists in a study's tables make; `tables`: these with defaults, by key.

    `models`: those of clients of different make, of which `model` is the first client's.
    """

    config: StudyConfig
    tables: Mapping[str, Any]
    data: DataSetting
    model: NamedAlgorithm | None
    models: tuple[ClientModel, ...]
    topologies: Sequence[TopologySetting]
    plans: Sequence[TrainingPlan]
    methods: Sequence[MethodSetting]
    computations: Sequence[ComputationSetting]
    defenses: Sequence[DefenseSetting]
    attack_settings: Sequence[AttackSetting]
    callbacks: tuple[NamedAlgorithm, ...]


class _GridPoint(NamedTuple):
    """A setting of each kind, beside what it is called in the name of a run."""

    topology: tuple[str, TopologySetting]
    plan: tuple[str, TrainingPlan]
    method: tuple[str, MethodSetting]
    computation: tuple[str, ComputationSetting]
    defense: tuple[str, DefenseSetting]
    world: TrainingVariant
    seed: int


def expand(config: StudyConfig, source: str, base: Path, code: NameResolver | None = None) -> Grid:
    """Return the runs of `config`; relative paths start from `base`. Raises `InvalidStudy` naming every mistake.

    `code`: where import paths may lead (default: nowhere); those of models are not followed here.
    """
    mistakes = Mistakes(source)
    if config.search is not None:
        mistakes.add("search", "is no grid: its runs are chosen one by one; give it to splitfed run")
    reader = StudyReader(mistakes, NameResolver(refusal="import paths are not followed here") if code is None else code)
    settings = _read_settings(reader, config, base)
    _check_repeats(mistakes, settings)
    attack_settings = settings.attack_settings
    keyed = tuple(
        replace(p, key=key)
        for p, key in zip(attack_settings, number_repeats([p.key for p in attack_settings]), strict=True)
    )
    worlds = plan_trainings(mistakes, keyed, config.study.honest)
    _check_size(mistakes, settings, len(worlds))
    mistakes.stop()
    resolved = _resolve(settings)
    cells = tuple(_make_cell(reader, settings, resolved, point) for point in _points(settings, worlds))
    return Grid(config.study.name, resolved, cells, config.study.skip_refused)


def _read_settings(reader: StudyReader, config: StudyConfig, base: Path) -> _Settings:
    """Read all tables of `config`; raises `InvalidStudy` naming every mistake in one of them."""
    mistakes = reader.mistakes
    data_table, data = _parse_data(reader, config.data, base)
    model_table, model, models = client_tables.parse_models(reader, config, base)
    batch_size = client_tables.parse_batch_sizes(mistakes, config.training.batch_size, config.data.clients)
    training_table, plans = training_tables.expand_training(reader, config.training)
    client_tables.check_cut_keys(reader, models, config.topology)
    place_model = partial(client_tables.expand_topologies_of, models)
    topology_tables, topologies = _expand_tables(reader, "topology", config.topology, place_model)
    method_tables, methods = _expand_tables(reader, "method", config.method, expand_method)
    secure = partial(expand_computation, base=base)
    computation_tables, computations = _expand_tables(reader, COMPUTATION, config.computations, secure)
    defense_tables, defenses = _expand_tables(reader, "defense", config.defense, expand_defense)
    attacks = [parse_attack(reader, f"attack[{i}]", table) for i, table in enumerate(config.attack)]
    called = [expand_callback(reader, f"callback[{i}]", table) for i, table in enumerate(config.callback)]
    mistakes.stop()
    assert data is not None
    tables = {
        "data": data_table,
        "model": model_table,
        "training": training_table,
        "topology": topology_tables,
        "method": method_tables,
        COMPUTATION: computation_tables,
        "defense": defense_tables,
        "callback": [table for table, _ in called],
    }
    return _Settings(
        config,
        tables,
        data,
        model,
        models,
        topologies,
        [replace(plan, batch_size=batch_size) for plan in plans],
        methods,
        computations,
        defenses,
        [found for found in attacks if found is not None],
        tuple(named for _, named in called),
    )


def _check_repeats(mistakes: Mistakes, settings: _Settings) -> None:
    """Note every setting that is there more than once."""
    given: dict[str, Sequence[Any]] = {
        "study.seeds": settings.config.study.seeds,
        "topology": [found.builder.label for found in settings.topologies],
        "training.schedule": [found.schedule.label for found in settings.plans],
        "method": [found.label for found in settings.methods],
        COMPUTATION: [found.label for found in settings.computations],
        "defense": [found.label for found in settings.defenses],
        "attack": [found.label for found in settings.attack_settings],
    }
    for where, values in given.items():
        for value, times in Counter(values).items():
            if times > 1:
                mistakes.add(where, f"{value} is there {times} times; expected once")


def _check_size(mistakes: Mistakes, settings: _Settings, worlds: int) -> None:
    """Note what leaves no run, or more than are allowed; `worlds`: in how many ways a setting is trained."""
    computations, defenses = settings.computations, settings.defenses
    guarded = sum(one.defended or not guard.parts for one in computations for guard in defenses)
    seeds = settings.config.study.seeds
    runs = len(settings.topologies) * len(settings.plans) * len(settings.methods) * guarded * worlds * len(seeds)
    if computations and defenses and not guarded:
        mistakes.add(COMPUTATION, "defended = false leaves no run: add a [[defense]] with name = 'none'")
    if settings.models and any(found.secure is not None for found in computations):
        mistakes.add(COMPUTATION, "is for clients that have one model; leave it out, or all [[model]] but one")
    if runs > LIMIT:
        mistakes.add("study", f"the grid has {runs} runs; at most {LIMIT} are allowed")


def _resolve(settings: _Settings) -> dict[str, Any]:
    """Return the study with every default filled in, without tables that say nothing."""
    study, tables = settings.config.study, settings.tables
    left_out = {
        "model": settings.model is None,
        "method": [found.part for found in settings.methods] == [None],
        COMPUTATION: all(found.secure is None for found in settings.computations),
    }
    return {
        "study": _study_table(study.name, study.seeds, study.honest, study.target)
        | ({"skip_refused": True} if study.skip_refused else {}),
        **{key: table for key, table in tables.items() if key != "callback" and not left_out.get(key, False)},
        "attack": [attack_table(p) for p in settings.attack_settings],
        **({"callback": tables["callback"]} if tables["callback"] else {}),
    }


def _points(settings: _Settings, worlds: Sequence[TrainingVariant]) -> Iterator[_GridPoint]:
    """Yield all points of the grid, but for defenses where a computation has none beside it."""
    grid = itertools.product(
        _with_names(settings.topologies, [found.builder.slug for found in settings.topologies]),
        _with_names(settings.plans, [found.schedule.slug for found in settings.plans]),
        _with_names(settings.methods, [found.slug for found in settings.methods]),
        _with_names(settings.computations, [found.slug for found in settings.computations]),
        _with_names(settings.defenses, [found.slug for found in settings.defenses]),
        worlds,
        settings.config.study.seeds,
    )
    for point in itertools.starmap(_GridPoint, grid):
        if point.computation[1].defended or not point.defense[1].parts:
            yield point


def _make_cell(reader: StudyReader, settings: _Settings, resolved: Mapping[str, Any], point: _GridPoint) -> RunSpec:
    """Return the run at a point of the grid."""
    (_, place), (_, plan), (_, layer), (_, computation), (_, guard), world, seed = point
    name = _name_run(settings, point)
    model = settings.model if client_tables.cuts_model(reader.code, place.builder.name) else None
    own_tables = {
        "topology": [place.builder.table],
        "method": [layer.table],
        COMPUTATION: [computation.table],
        "defense": [guard.table],
        "training": {**settings.tables["training"], "schedule": plan.schedule.table},
    }
    out = (
        _reading_computations(settings.attack_settings, settings.computations) if computation.secure is None else set()
    )
    left_out = tuple((setting.label, IN_PLAIN) for setting in world.attacks if setting.label in out)
    world = world._replace(attacks=tuple(setting for setting in world.attacks if setting.label not in out))
    return RunSpec(
        name,
        seed,
        settings.data,
        model,
        place,
        guard,
        plan,
        world.attacks,
        _config_alone(resolved, name, seed, world, own_tables, model is not None),
        world.training_attack,
        layer,
        computation,
        settings.config.study.target,
        reader.code,
        left_out=left_out,
        models=() if model is None else settings.models,
        callbacks=settings.callbacks,
    )


def _name_run(settings: _Settings, point: _GridPoint) -> str:
    """Return what the run at a point is called: its settings of the kinds that vary, and its seed."""
    attack = point.world.training_attack
    return "--".join(
        [
            point.topology[0],
            *([point.plan[0]] if len(settings.plans) > 1 else []),
            *([point.method[0]] if len(settings.methods) > 1 else []),
            *([point.computation[0]] if len(settings.computations) > 1 else []),
            point.defense[0],
            *([] if attack is None else [f"{attack.key}-inside"]),
            f"seed{point.seed}",
        ]
    )


def _reading_computations(
    attack_settings: Sequence[AttackSetting], computations: Sequence[ComputationSetting]
) -> set[str]:
    """Return the labels of attacks on secure computations, in a study that has such runs beside others in plain."""
    if all(one.secure is None for one in computations):
        return set()
    return {
        p.label for p in attack_settings if not OF_COMPUTATIONS.isdisjoint(getattr(p.attack.factory, "requires", ()))
    }


def _expand_tables(
    reader: StudyReader,
    key: str,
    tables: Sequence[T],
    expand_one: Callable[[StudyReader, str, T], tuple[dict[str, Any], list[S]]],
) -> tuple[list[dict[str, Any]], list[S]]:
    """Return the tables under `key` with defaults, and all settings of their grids."""
    found = [expand_one(reader, f"{key}[{i}]", table) for i, table in enumerate(tables)]
    return [written for written, _ in found], [setting for _, settings in found for setting in settings]


def _with_names(settings: Sequence[S], names: Sequence[str]) -> list[tuple[str, S]]:
    return list(zip(number_repeats(names), settings, strict=True))


def _study_table(name: str, seeds: Sequence[int], honest: bool, target: float | None) -> dict[str, Any]:
    """Return the table `[study]` without what has its default."""
    own = {} if target is None else {"target": target}
    return {"name": name, "seeds": list(seeds), **({} if honest else {"honest": False}), **own}


def _config_alone(
    resolved: Mapping[str, Any],
    name: str,
    seed: int,
    world: TrainingVariant,
    own_tables: Mapping[str, Any],
    cuts_model: bool,
) -> dict[str, Any]:
    """Return the study that consists of one run alone, as plain TOML tables."""
    own_name, honest = slug(name).replace("+", "-"), world.training_attack is None
    return {
        **{key: table for key, table in resolved.items() if key != "model" or cuts_model},
        "study": _study_table(own_name, [seed], honest, resolved["study"].get("target")),
        **{key: table for key, table in own_tables.items() if key in resolved},
        "attack": [attack_table(p) for p in world.attacks],
    }


def attack_table(setting: AttackSetting) -> dict[str, Any]:
    """Return the `[[attack]]` table that means `setting`."""
    return {
        "name": setting.attack.name,
        **setting.attack.label_values,
        **setting.attack.parameters,
        **({} if setting.every is None else {"every": setting.every}),
        **({} if setting.floors else {"floors": False}),
        "adversary": setting.adversary,
    }


def _parse_data(reader: StudyReader, table: DataTable, base: Path) -> tuple[dict[str, Any], DataSetting | None]:
    split = {key: getattr(table, key) for key in DataTable.SPLIT if getattr(table, key) is not None}
    keys = [key for key in DataTable.model_fields if key != "name"]
    written, loaders = expand_algorithm(
        reader, "data", "data", table.name, table.extra, keys=keys, base=base, grid=False
    )
    parts_written, parts = data_tables.parse_parts(reader, table)
    transform = data_tables.find_transform(reader, parts_written)
    source = DataSetting(loaders[0], table.clients, split, parts, transform) if loaders else None
    return {**written, "clients": table.clients, **split, **parts_written}, source


def number_repeats(names: Sequence[str]) -> list[str]:
    """Return `names` with a number at those that came before."""
    counts: defaultdict[str, Iterator[int]] = defaultdict(partial(itertools.count, 1))
    numbered = ((name, next(counts[name])) for name in names)
    return [name if number == 1 else f"{name}-{number}" for name, number in numbered]
