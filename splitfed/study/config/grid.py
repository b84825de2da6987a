"""From a study's tables to its runs: names looked up, parameters checked and constructed, lists expanded."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from splitfed.attacks.threat_model import OF_COMPUTATIONS
from splitfed.models.import_paths import NameResolver
from splitfed.study.config.algorithm_tables import (
    computation_parameters,
    defense_settings,
    read_attack,
    read_computation,
    read_defense,
    read_setting,
)
from splitfed.study.config.callback_tables import read_callback
from splitfed.study.config.client_tables import (
    check_cut_keys,
    cuts_model,
    parse_batch_sizes,
    read_models,
    read_topology,
)
from splitfed.study.config.data_table import read_data
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import (
    COMPUTATION,
    AttackSetting,
    ClientModel,
    RunSpec,
)
from splitfed.study.config.schema import StudyConfig
from splitfed.study.config.search_space import list_tables
from splitfed.study.config.training_attacks import TrainingVariant, plan_trainings
from splitfed.study.config.training_table import list_schedules, read_training
from splitfed.study.config.values import LIMIT, absolute_paths, changed_fields, plain, table_of

T = TypeVar("T")
Table = Mapping[str, Any]

IN_PLAIN = "it reads a layer that computes on ciphertexts, and this run is in plain"
"""Why an attack on a secure computation is left out of a run in plain, beside secured ones."""

AXES = {
    "topology": "topology",
    "schedule": "training.schedule",
    "method": "method",
    "computation": COMPUTATION,
    "defense": "defense",
}
"""Kind of settings of a grid, the first varying slowest -> where they stand in a study."""

NAMED = ("topology", "defense")
"""Kinds that stand in the name of a run also where a study has one setting of them."""


@dataclass(frozen=True)
class Grid:
    """All runs of a study, and the study as plain TOML tables whose paths start anywhere.

    `skip_refused`: whether runs that are refused are left out, as `refused` then has them: name and reason, in pairs.
    """

    name: str
    resolved: Mapping[str, Any]
    cells: tuple[RunSpec, ...]
    skip_refused: bool = False
    refused: tuple[tuple[str, str], ...] = ()


def expand(config: StudyConfig, source: str, base: Path, code: NameResolver | None = None) -> Grid:
    """Return the runs of `config`; relative paths start from `base`. Raises `InvalidStudy` naming every mistake.

    `code`: where import paths may lead (default: nowhere); those of models are not followed here.
    """
    mistakes = Mistakes(source)
    if config.search is not None:
        mistakes.add("search", "is no grid: its runs are chosen one by one; give it to splitfed run")
    reader = StudyReader(mistakes, NameResolver(refusal="import paths are not followed here") if code is None else code)
    data = read_data(reader, config.data, base)
    model, models = read_models(reader, config, base)
    batch_size = parse_batch_sizes(mistakes, config.training.batch_size, config.data.clients)
    training = read_training(reader, config.training, batch_size)
    axes = _read_axes(reader, config, models, base)
    asked = [read_attack(reader, f"attack[{i}]", table) for i, table in enumerate(config.attack)]
    called = [read_callback(reader, f"callback[{i}]", table) for i, table in enumerate(config.callback)]
    mistakes.stop()
    assert data is not None
    assert training is not None
    attacks = [found for found in asked if found is not None]
    labels = {AXES[key]: [one.label for one in settings] for key, settings in axes.items()}
    for where, values in {"study.seeds": config.study.seeds, **labels, "attack": [p.label for p in attacks]}.items():
        for value, times in Counter(values).items():
            if times > 1:
                mistakes.add(where, f"{value} is there {times} times; expected once")
    keys = number_repeats([p.key for p in attacks])
    attacks = [replace(p, key=key) for p, key in zip(attacks, keys, strict=True)]
    worlds = plan_trainings(mistakes, attacks, config.study.honest)
    _check_size(mistakes, axes, bool(models), len(worlds) * len(config.study.seeds))
    mistakes.stop()
    callbacks = tuple(named for named in called if named is not None)
    common = RunSpec("", 0, data, model, training=training, target=config.study.target, code=reader.code)
    common = replace(common, models=models, callbacks=callbacks, skip_refused=config.study.skip_refused)
    cells = tuple(_make_cells(common, axes, worlds, config.study.seeds))
    return Grid(config.study.name, _resolve(config, common, base), cells, config.study.skip_refused)


def _read_axes(
    reader: StudyReader, config: StudyConfig, models: Sequence[ClientModel], base: Path
) -> dict[str, list[Any]]:
    """Return kind -> every setting of it that the tables of a study, and the lists in them, make."""
    check_cut_keys(reader, models, config.topology)

    def read_all(kind: str, places: Sequence[tuple[str, Table]], read: Callable[[str, Table], T | None]) -> list[T]:
        points = [(where, point) for where, one in places for point in list_tables(reader, where, kind, one)]
        return [found for where, point in points if (found := read(where, point)) is not None]

    guards = [
        defense_settings(place[0], read_all("defenses", [place], partial(read_defense, reader)))
        for place in _places("defense", config.defense)
    ]
    return {
        "topology": read_all(
            "topologies", _places("topology", config.topology), partial(read_topology, reader, models)
        ),
        "schedule": read_all(
            "schedules",
            list_schedules(reader.mistakes, config.training.schedule),
            partial(read_setting, reader, "schedules"),
        ),
        "method": read_all("methods", _places("method", config.method), partial(read_setting, reader, "methods")),
        "computation": read_all(
            "computations", _places(COMPUTATION, config.computations), partial(read_computation, reader, base)
        ),
        "defense": [setting for settings in guards for setting in settings],
    }


def _places(key: str, tables: Sequence[Any]) -> list[tuple[str, Table]]:
    return [(f"{key}[{i}]", table_of(one)) for i, one in enumerate(tables)]


def _check_size(mistakes: Mistakes, axes: Mapping[str, Sequence[Any]], mixed: bool, each: int) -> None:
    """Note what leaves no run, or more than are allowed; `each`: how often a setting is trained.

    `mixed`: whether clients have models of different make.
    """
    computations, defenses = axes["computation"], axes["defense"]
    guarded = sum(one.defended or not guard.parts for one in computations for guard in defenses)
    runs = len(axes["topology"]) * len(axes["schedule"]) * len(axes["method"]) * guarded * each
    if computations and defenses and not guarded:
        mistakes.add(COMPUTATION, "defended = false leaves no run: add a [[defense]] with name = 'none'")
    if mixed and any(found.secure is not None for found in computations):
        mistakes.add(COMPUTATION, "is for clients that have one model; leave it out, or all [[model]] but one")
    if runs > LIMIT:
        mistakes.add("study", f"the grid has {runs} runs; at most {LIMIT} are allowed")


def _make_cells(
    common: RunSpec, axes: Mapping[str, Sequence[Any]], worlds: Sequence[TrainingVariant], seeds: Sequence[int]
) -> Iterator[RunSpec]:
    """Yield `common` at all points of the grid, but for defenses where a computation has none beside it."""
    named = [list(zip(number_repeats([one.slug for one in found]), found, strict=True)) for found in axes.values()]
    told = [key in NAMED or len(found) > 1 for key, found in axes.items()]
    secured = any(one.secure is not None for one in axes["computation"])
    for chosen, world, seed in itertools.product(itertools.product(*named), worlds, seeds):
        point: dict[str, Any] = dict(zip(axes, (setting for _, setting in chosen), strict=True))
        if not point["computation"].defended and point["defense"].parts:
            continue
        inside = world.training_attack
        stem = [name for (name, _), tell in zip(chosen, told, strict=True) if tell]
        stem += [] if inside is None else [f"{inside.key}-inside"]
        plain_beside = secured and point["computation"].secure is None
        out = [p.label for p in world.attacks if plain_beside and _reads_computation(p)]
        whole = cuts_model(common.code, point["topology"].part.name)
        yield replace(
            common,
            model=common.model if whole else None,
            models=common.models if whole else (),
            **point,
            id="--".join([*stem, f"seed{seed}"]),
            seed=seed,
            attacks=tuple(p for p in world.attacks if p.label not in out),
            training_attack=inside,
            left_out=tuple((label, IN_PLAIN) for label in out),
        )


def _reads_computation(setting: AttackSetting) -> bool:
    return not OF_COMPUTATIONS.isdisjoint(getattr(setting.attack.factory, "requires", ()))


def _resolve(config: StudyConfig, common: RunSpec, base: Path) -> dict[str, Any]:
    """Return the study as plain tables, without those that say nothing; relative paths stand in it as absolute ones."""
    single: Any = [one.table for one in common.models] or (common.model and common.model.table)
    schedules = [table for _, table in list_schedules(Mistakes(""), config.training.schedule)]
    training = table_of(config.training) | {"optimizer": dict(common.training.optimizer_table)}
    training["schedule"] = schedules[0] if len(schedules) == 1 else schedules
    tables = changed_fields(config) | {"data": common.data.table, "training": training}
    tables |= {"study": changed_fields(config.study)} | ({"model": single} if single else {})
    if COMPUTATION in tables:
        folders = [table_of(one) for one in config.computations]
        tables[COMPUTATION] = [absolute_paths(one, computation_parameters(), base) for one in folders]
    return {key: plain(table) for key, table in tables.items()}


def number_repeats(names: Sequence[str]) -> list[str]:
    """Return `names` with a number at those that came before."""
    counts: defaultdict[str, Iterator[int]] = defaultdict(partial(itertools.count, 1))
    numbered = ((name, next(counts[name])) for name in names)
    return [name if number == 1 else f"{name}-{number}" for name, number in numbered]
