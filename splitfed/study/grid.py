"""From a study's tables to its runs: names looked up, parameters checked and constructed, lists expanded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from splitfed.attacks.base import Attack
from splitfed.defense import Defense
from splitfed.errors import InvalidInput, unknown
from splitfed.optim import Optim
from splitfed.registry import TABLES, load
from splitfed.study import parameters
from splitfed.study.cell import Cell, Guarded, Named, Placed, Plan, Probe, Source, slug
from splitfed.study.config import DataTable, DefenseTable, StudyConfig, TrainingTable
from splitfed.study.mistakes import Mistakes, shown
from splitfed.study.parameters import Parameter, Points, parameters_of
from splitfed.view import Recording

LIMIT = 10_000
# What the runner itself passes to a builder, so the study cannot.
HIDDEN = {"topologies": ("model", "task"), "models": ("shape", "outputs")}

Built = tuple[dict[str, Any], Named]


@dataclass(frozen=True)
class Grid:
    """All runs of a study, and the study with every default filled in (as plain TOML tables)."""

    name: str
    resolved: Mapping[str, Any]
    cells: tuple[Cell, ...]


def expand(config: StudyConfig, source: str, base: Path) -> Grid:
    """Return the runs of `config`; relative paths start from `base`. Raises `InvalidStudy` naming every mistake."""
    mistakes = Mistakes(source)
    data, data_table = _data(mistakes, config.data, base)
    model, model_table = _model(mistakes, config)
    training, training_table = _training(mistakes, config.training)
    topologies = [_topology(mistakes, i, t.name, t.extra) for i, t in enumerate(config.topology)]
    defenses = [_defense(mistakes, f"defense[{i}]", t) for i, t in enumerate(config.defense)]
    attacks = [_attack(mistakes, i, config) for i in range(len(config.attack))]
    _distinct(mistakes, "study.seeds", config.study.seeds)
    mistakes.stop()
    assert data is not None
    assert model is not None
    assert training is not None
    settings = [(table, setting) for _, points in defenses for table, setting in points]
    placed = [(table, point) for _, points in topologies for table, point in points]
    probes = _keyed([probe for _, probe in attacks if probe is not None])
    _distinct(mistakes, "topology", [point.builder.label for _, point in placed])
    _distinct(mistakes, "defense", [setting.label for _, setting in settings])
    _distinct(mistakes, "attack", [f"{p.label} by {p.adversary or 'the default'}" for p in probes])
    runs = len(placed) * len(settings) * len(config.study.seeds)
    if runs > LIMIT:
        mistakes.add("study", f"the grid has {runs} runs; at most {LIMIT} are allowed")
    mistakes.stop()
    resolved = {
        "study": {"name": config.study.name, "seeds": list(config.study.seeds)},
        "data": data_table,
        "model": model_table,
        "training": training_table,
        "topology": [table for table, _ in topologies],
        "defense": [table for table, _ in defenses],
        "attack": [table for table, _ in attacks],
    }
    slugs = _unique([point.builder.slug for _, point in placed])
    guards = _unique([setting.slug for _, setting in settings])
    cells = []
    for (t, (where, placing)), (d, (guard, setting)), seed in itertools.product(
        zip(slugs, placed, strict=True), zip(guards, settings, strict=True), config.study.seeds
    ):
        name = f"{t}--{d}--seed{seed}"
        only = {"study": {"name": slug(name), "seeds": [seed]}, "topology": [where], "defense": [guard]}
        cells.append(Cell(name, seed, data, model, placing, setting, training, probes, {**resolved, **only}))
    return Grid(config.study.name, resolved, tuple(cells))


def _data(mistakes: Mistakes, table: DataTable, base: Path) -> tuple[Source | None, dict[str, Any]]:
    split = {key: getattr(table, key) for key in DataTable.SPLIT if getattr(table, key) is not None}
    if table.name not in TABLES["data"]:
        mistakes.add("data.name", unknown("data set", table.name, TABLES["data"]))
        return None, {}
    keys = [key for key in DataTable.model_fields if key != "name"]
    found = _checked(mistakes, "data", parameters_of(load("data", table.name)), table.extra, keys=keys, base=base)
    written = {"name": table.name, **found.written, "clients": table.clients, **split}
    return Source(table.name, found.points[0] if found.points else {}, table.clients, split), written


def _model(mistakes: Mistakes, config: StudyConfig) -> tuple[Named | None, dict[str, Any]]:
    name, given = config.model.name, config.model.extra
    if ":" in name:
        return Named(name, given, given), {"name": name, **given}
    found = _registered(mistakes, "model", "models", name, given)
    point = found[1][0] if found[1] else None
    return point, {"name": name, **found[0]}


def _training(mistakes: Mistakes, table: TrainingTable) -> tuple[Plan | None, dict[str, Any]]:
    given = {"name": table.schedule} if isinstance(table.schedule, str) else dict(table.schedule)
    schedule, written = _instance(mistakes, "training.schedule", "schedules", given)
    optimizer: Optim | Mapping[str, Optim] = Optim()
    by_role = bool(table.optimizer) and all(
        isinstance(v, dict) and k != "scheduler" for k, v in table.optimizer.items()
    )
    if by_role:
        pairs = {role: _optim(mistakes, f"training.optimizer.{role}", t) for role, t in table.optimizer.items()}
        optimizer = {role: optim for role, optim in pairs.items() if optim is not None}
    elif table.optimizer:
        optimizer = _optim(mistakes, "training.optimizer", table.optimizer) or optimizer
    recorded = table.record
    record = Recording() if recorded is None else Recording(tuple(recorded.parties), recorded.every, recorded.budget)
    resolved = table.model_dump(exclude={"record"} if recorded is None else set())
    resolved["schedule"] = {"name": given.get("name"), **written}
    resolved["optimizer"] = (
        {role: _written(optim) for role, optim in optimizer.items()}
        if isinstance(optimizer, Mapping)
        else _written(optimizer)
    )
    if schedule is None:
        return None, resolved
    plain = (table.rounds, table.batch_size, table.local_epochs, table.evaluate_every, table.device)
    return Plan(schedule, optimizer, *plain, record), resolved


def _optim(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Optim | None:
    """Return `{name, lr, ..., scheduler = {name, ...}}` as an `Optim`; torch refuses what it does not know."""
    options = dict(table)
    name, scheduler = options.pop("name", "SGD"), options.pop("scheduler", None)
    rest = dict(scheduler) if isinstance(scheduler, dict) else {"name": scheduler}
    with mistakes.at(where):
        for text in (name, rest.get("name", "")):
            if text is not None and not isinstance(text, str):
                raise InvalidInput(f"name={shown(text)} is not allowed; expected text")
        return Optim(name, options, rest.pop("name", None), rest)
    return None


def _written(optim: Optim) -> dict[str, Any]:
    scheduler = {"scheduler": {"name": optim.scheduler, **optim.scheduler_options}} if optim.scheduler else {}
    return {"name": optim.name, **optim.options, **scheduler}


def _topology(
    mistakes: Mistakes, index: int, name: str, given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Placed]]]:
    where = f"topology[{index}]"
    written, points = _registered(mistakes, where, "topologies", name, given, grid=True)
    return {"name": name, **written}, [({"name": name, **p.parameters}, Placed(where, p)) for p in points]


def _defense(
    mistakes: Mistakes, where: str, table: DefenseTable
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Guarded]]]:
    if table.combine is not None:
        for key in [*table.extra, *(["name"] if table.name is not None else [])]:
            mistakes.add(f"{where}.{key}", "is not allowed beside combine; put it into one of its tables")
        parts = [_part(mistakes, f"{where}.combine[{i}]", part) for i, part in enumerate(table.combine)]
        combined = {"combine": [written for written, _ in parts]}
        points = []
        for chosen in itertools.product(*(found for _, found in parts)):
            tables = {"combine": [written for written, _ in chosen]}
            points.append((tables, _guarded(where, [part for _, part in chosen], [len(f) for _, f in parts])))
        return combined, points
    if table.name == "none":
        for key in table.extra:
            mistakes.add(f"{where}.{key}", unknown("key", key, ["name"]))
        return {"name": "none"}, [({"name": "none"}, _guarded(where, [], []))]
    given = {**({} if table.name is None else {"name": table.name}), **table.extra}
    written, found = _part(mistakes, where, given)
    return written, [(point, _guarded(where, [part], [len(found)])) for point, part in found]


def _part(mistakes: Mistakes, where: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Built]]:
    """Return one defense as written and as built at every point of its grid."""
    rest = dict(given)
    name = rest.pop("name", None)
    if name is None:
        mistakes.add(f"{where}.name", "is missing; add name = ...")
        return {}, []
    if not isinstance(name, str):
        mistakes.add(f"{where}.name", f"{shown(name)} is not allowed; expected text")
        return {}, []
    written, points = _registered(mistakes, where, "defenses", name, rest, grid=True)
    points = [p for p in points if _built(mistakes, where, "defenses", p) is not None]
    return {"name": name, **written}, [({"name": name, **p.parameters}, p) for p in points]


def _guarded(where: str, parts: Sequence[Named], sizes: Sequence[int]) -> Guarded:
    """Strength is that of the first part which varies over the grid, or else of the first part."""
    varying = next((i for i, size in enumerate(sizes) if size > 1), 0)
    strength = _strength(parts[varying]) if parts else None
    built: list[Defense] = [load("defenses", part.name)(**_tuples(part.parameters)) for part in parts]
    guarantee = "; ".join(dict.fromkeys(defense.guarantee for defense in built)) or "no formal guarantee"
    return Guarded(where, tuple(parts), 0.0 if strength is None else float(strength[1]), guarantee)


def _strength(part: Named) -> tuple[str, float] | None:
    """Return the first numeric parameter of a defense: by convention its strength."""
    for field in dataclass_fields(load("defenses", part.name)):
        value = part.parameters.get(field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return field.name, value
    return None


def _attack(mistakes: Mistakes, index: int, config: StudyConfig) -> tuple[dict[str, Any], Probe | None]:
    table, where = config.attack[index], f"attack[{index}]"
    found = probe(mistakes, where, table.name, table.preset, table.extra, table.adversary)
    if found is None:
        return {}, None
    adversary = {} if table.adversary is None else {"adversary": table.adversary}
    return {"name": table.name, "preset": table.preset, **found.attack.parameters, **adversary}, found


def probe(
    mistakes: Mistakes, where: str, name: str, preset: str, given: Mapping[str, Any], adversary: str | None
) -> Probe | None:
    """Return the attack `name` with the parameters of `preset` changed by `given`, or note what is wrong."""
    if name not in TABLES["attacks"]:
        mistakes.add(f"{where}.name", unknown("attack", name, TABLES["attacks"]))
        return None
    kind: type[Attack] = load("attacks", name)
    if preset not in kind.presets:
        mistakes.add(f"{where}.preset", unknown("preset", preset, kind.presets))
        return None
    allowed = parameters_of(kind)
    preferred = {**{k: p.default for k, p in allowed.items()}, **kind.presets[preset]}
    with_presets = {k: Parameter(k, p.hint, preferred[k]) for k, p in allowed.items()}
    found = _checked(mistakes, where, with_presets, given, keys=["preset", "adversary"])
    if not found.points:
        return None
    changed = {k: v for k, v in found.points[0].items() if k not in preferred or _tuple(v) != preferred[k]}
    named = Named(name, found.points[0], {"preset": preset, **changed})
    if _built(mistakes, where, "attacks", named) is None:
        return None
    return Probe(where, name, named.label, named, adversary)


def _keyed(probes: Sequence[Probe]) -> tuple[Probe, ...]:
    keys = _unique([p.key for p in probes])
    return tuple(Probe(p.where, k, p.label, p.attack, p.adversary) for k, p in zip(keys, probes, strict=True))


def _instance(mistakes: Mistakes, where: str, kind: str, given: dict[str, Any]) -> tuple[Named | None, dict[str, Any]]:
    """Check one algorithm that is written as a table with a name, and construct it once."""
    rest = dict(given)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        mistakes.add(f"{where}.name", f"{shown(name)} is not allowed; expected text")
        return None, {}
    written, points = _registered(mistakes, where, kind, name, rest)
    if not points or _built(mistakes, where, kind, points[0]) is None:
        return None, written
    return points[0], written


def _registered(
    mistakes: Mistakes, where: str, kind: str, name: str, given: Mapping[str, Any], *, grid: bool = False
) -> tuple[dict[str, Any], list[Named]]:
    if name not in TABLES[kind]:
        extra = ["none"] if kind == "defenses" else []
        place = where if where == "training.schedule" else f"{where}.name"
        mistakes.add(place, unknown(kind[:-1] if kind != "topologies" else "topology", name, [*TABLES[kind], *extra]))
        return {}, []
    allowed = parameters_of(load(kind, name), HIDDEN.get(kind, ()))
    found = _checked(mistakes, where, allowed, given, grid=grid)
    return found.written, [Named(name, point, _told(kind, name, allowed, point)) for point in found.points]


def _told(kind: str, name: str, allowed: Mapping[str, Parameter], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters worth telling: required ones, those changed, and a defense's strength."""
    strength = _strength(Named(name, point, {})) if kind == "defenses" else None
    return {
        key: value
        for key, value in point.items()
        if allowed[key].required or _tuple(value) != allowed[key].default or (strength and key == strength[0])
    }


def _checked(mistakes: Mistakes, where: str, *args: Any, **options: Any) -> Points:
    """As `parameters.check`, but without points where there was a mistake."""
    own = mistakes.fresh()
    found = parameters.check(own, where, *args, **options)
    mistakes.take(own)
    return Points(found.written, ()) if own else found


def _built(mistakes: Mistakes, where: str, kind: str, part: Named) -> Any:
    """Construct an algorithm so that it can refuse its parameters; the parameter it names is put into the place."""
    try:
        return load(kind, part.name)(**_tuples(part.parameters))
    except InvalidInput as error:
        named = next((p for p in part.parameters if f"{p}=" in str(error)), None)
        named = named or next((p for p in part.parameters if p in str(error).split()), None)
        mistakes.add(where if named is None else f"{where}.{named}", error)
        return None


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    """TOML knows lists only; frozen values hold tuples."""
    return {key: _tuple(value) for key, value in given.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list) else value


def _distinct(mistakes: Mistakes, where: str, values: Sequence[Any]) -> None:
    for value in dict.fromkeys(v for v in values if values.count(v) > 1):
        mistakes.add(where, f"{value} is there {values.count(value)} times; expected once")


def _unique(names: Sequence[str]) -> list[str]:
    """Return `names` with a number at those that came before."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return result
