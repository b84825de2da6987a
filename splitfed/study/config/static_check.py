"""What can be told of a study without torch: keys, names, plain types and declared bounds, of all tables at once.

A study with an unknown key, or with a table that is not what it has to be, is refused here, with everything else that
is seen to be wrong with it, before any slow package is imported. Names, types and bounds alone are no reason to stop:
what the pieces themselves refuse is then told together with them, by `splitfed.study.config.grid`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitfed.core.encryption_settings import Encryption
from splitfed.core.errors import InvalidInput, unknown
from splitfed.registry import PLUGINS, SINGULAR, TABLES
from splitfed.study.config import schema
from splitfed.study.config.mistakes import InvalidStudy, Mistakes, in_file_order
from splitfed.study.config.parameters import Parameter, check_parameters, parameters_of
from splitfed.study.config.schema import (
    AttackTable,
    DataTable,
    DefenseTable,
    MethodTable,
    ModelTable,
    OpenTable,
    TopologyTable,
)
from splitfed.study.config.static_parameters import (
    StaticParameter,
    optimizer_options,
    read_parameters,
    scheduler_options,
)

NAMING: Mapping[str, tuple[str, type[OpenTable]]] = {
    "data": ("data", DataTable),
    "model": ("models", ModelTable),
    "topology": ("topologies", TopologyTable),
    "method": ("methods", MethodTable),
    "defense": ("defenses", DefenseTable),
    "attack": ("attacks", AttackTable),
}
"""Table -> the kind of algorithm that it names, and the schema of its own keys beside the algorithm's parameters."""

WITHOUT = ("methods", "defenses")
"""Kinds of which a study may have "none"."""

BUILT: Mapping[str, Sequence[str]] = {
    "topologies": ("model", "task", "example", "encryption"),
    "models": ("shape", "outputs", "seed"),
}
"""Kind -> parameters that no study writes: what splitfed itself gives."""

SEGMENT, HEAD = "splitfed.core.topology:Segment", "splitfed.core.topology:Head"
OPTIMIZER = ("name", "scheduler", "clip_norm", "groups")
"""Keys of an optimizer's table beside the options of the optimizer."""


def check_file(path: Path) -> None:
    """Refuse the study in the file `path` for what can be told without torch; raises `InvalidInput`."""
    check_statically(schema.read_toml(path), path.name)


def check_statically(raw: Mapping[str, Any], source: str) -> None:
    """Raise `InvalidStudy` with all that can be told of the study `raw`, where its keys or its tables are wrong."""
    with in_file_order(raw):
        found = _StaticCheck(raw, source)
        found.run()
        if found.structural:
            found.mistakes.stop()


class _StaticCheck:
    """Collects the mistakes of one study; `structural`: whether a key or a table is among them.

    `searched`: ranges and choices stand in the place of values, which are then not looked at.
    """

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.mistakes, self._source = Mistakes(source), source
        self.structural = False
        self.searched = "search" in raw
        self.raw = {key: _all_options(table) for key, table in raw.items()} if self.searched else raw
        self._given = raw
        models = self.raw.get("model")
        self._several_models = isinstance(models, list) and len(models) > 1

    def run(self) -> None:
        """Look at every table."""
        first = {k: v if k == "search" else _first_option(v) for k, v in self._given.items()}
        try:
            schema.parse_study(first if self.searched else self._given, self._source)
        except InvalidStudy as error:
            self.mistakes.take_lines(error.lines, error.more)
            self.structural = True
        for key, (kind, schema_table) in NAMING.items():
            own = [name for name in schema_table.model_fields if name != "name"]
            if key == "model" and self._several_models:
                own += schema.MODEL_KEYS
            for where, table in _tables(self.raw, key):
                if isinstance(parts := table.get("combine"), list) and key == "defense":
                    for i, part in enumerate(parts):
                        if isinstance(part, Mapping):
                            self._check(f"{where}.combine[{i}]", kind, part)
                else:
                    self._check(where, kind, {k: v for k, v in table.items() if k not in own}, own)
        self._check_training(self.raw.get("training"))
        for where, table in _tables(self.raw, "encryption"):
            if table.get("protocol") != "none":
                allowed = parameters_of(Encryption) | {"key_folder": Parameter("key_folder", Path, None)}
                given = {key: value for key, value in table.items() if key != "defended"}
                self._check_values(where, allowed, given, ["defended"])

    def _check_training(self, table: Any) -> None:
        if not isinstance(table, Mapping):
            return
        schedules = table.get("schedule")
        for i, one in enumerate(schedules if isinstance(schedules, list) else [schedules]):
            where = f"training.schedule[{i}]" if isinstance(schedules, list) else "training.schedule"
            if isinstance(one, (str, Mapping)):
                self._check(where, "schedules", {"name": one} if isinstance(one, str) else one)
        optimizer = table.get("optimizer")
        if isinstance(optimizer, Mapping) and optimizer:
            by_role = all(isinstance(value, Mapping) and key != "scheduler" for key, value in optimizer.items())
            for role, one in optimizer.items() if by_role else [("", optimizer)]:
                self._check_optimizer(f"training.optimizer.{role}".removesuffix("."), one)
        speeds = table.get("speeds")
        if isinstance(speeds, Mapping):
            self._check_keys("training.speeds", read_parameters("splitfed.costs.speeds:Speeds"), speeds)
            named = speeds.get("named")
            machines = {f"named.{name}": one for name, one in named.items()} if isinstance(named, Mapping) else {}
            for name, one in {"default": speeds.get("default"), **machines}.items():
                if isinstance(one, Mapping):
                    self._check_keys(f"training.speeds.{name}", read_parameters("splitfed.costs.speeds:Machine"), one)

    def _check_optimizer(self, where: str, table: Mapping[str, Any]) -> None:
        """Note keys that the optimizer, or its scheduler, does not have, as `core.optimizers` words them."""
        scheduler = table.get("scheduler")
        rest = scheduler if isinstance(scheduler, Mapping) else {}
        for what, given, options, own in (
            ("optimizer", table, optimizer_options, OPTIMIZER),
            ("scheduler", rest, scheduler_options, ("name", "every")),
        ):
            name = given.get("name", "SGD" if given is table else None)
            if not isinstance(name, str) or (allowed := options(name)) is None:
                continue  # Whether there is one of that name is said when torch is there.
            for key in given:
                if key not in (*own, *allowed):
                    self.mistakes.add(where, unknown(f"option of {what} {name}", key, allowed))
                    self.structural = True

    def _check(self, where: str, kind: str, table: Mapping[str, Any], keys: Sequence[str] = ()) -> None:
        """Look at a table that names an algorithm of `kind`; `keys`: what else may stand there."""
        name = table.get("name")
        if not isinstance(name, str) or ":" in name:
            return
        if name == "none" and kind in WITHOUT:
            allowed: Mapping[str, Parameter] | None = {}
        else:
            allowed = self._find(f"{where}.name", kind, name)
        given = {key: value for key, value in table.items() if key != "name"}
        if allowed is not None:
            self._check_values(where, allowed, given, keys if allowed or name != "none" else ["name"])

    def _find(self, where: str, kind: str, name: str) -> dict[str, StaticParameter] | None:
        """Return the parameters of the registered `name`; None where it is unknown, and where they cannot be read."""
        if name not in TABLES[kind]:
            known = [*TABLES[kind], *(["none"] if kind in WITHOUT else [])]
            self.mistakes.add(where, unknown(SINGULAR[kind], name, known))
            return None
        if (kind, name) in PLUGINS or (found := read_parameters(TABLES[kind][name])) is None:
            return None
        return {key: parameter for key, parameter in found.items() if key not in BUILT.get(kind, ())}

    def _check_values(
        self, where: str, allowed: Mapping[str, Parameter], given: Mapping[str, Any], keys: Sequence[str]
    ) -> None:
        """Note unknown keys, and values that are of another type or out of bounds than their parameters allow."""
        self._check_keys(where, allowed, given, keys)
        for key, value in given.items():
            parameter = allowed.get(key)
            if isinstance(parameter, StaticParameter) and parameter.pieces is not None:
                self._check_pieces(f"{where}.{key}", parameter.pieces, value)
            elif parameter is not None and not self.searched:
                self._check_value(where, parameter, value)
        for key, parameter in allowed.items():
            # Where there are several models each may say where it is cut.
            elsewhere = self._several_models and where.startswith("topology") and key in schema.CUT_KEYS
            if parameter.required and key not in given and parameter.hint is not Any and not elsewhere:
                check_parameters(self.mistakes, where, {key: parameter}, {})

    def _check_keys(
        self, where: str, allowed: Mapping[str, Parameter] | None, given: Mapping[str, Any], keys: Sequence[str] = ()
    ) -> None:
        for key in given if allowed is not None else ():
            if key not in (allowed or {}):
                self.mistakes.add(f"{where}.{key}", unknown("key", key, [*keys, *(allowed or {})]))
                self.structural = True

    def _check_value(self, where: str, parameter: Parameter, value: Any) -> None:
        grid = not where.startswith(("data", "model", "attack"))
        with self.mistakes.part() as own:
            check_parameters(own, where, {parameter.name: parameter}, {parameter.name: value}, grid=grid)
            if own or not isinstance(parameter, StaticParameter) or parameter.check is None:
                return
            for one in value if isinstance(value, list) and not parameter.takes(value) else [value]:
                if isinstance(one, (bool, int, float, str)):
                    try:
                        parameter.check(one)
                    except InvalidInput as error:
                        own.add(f"{where}.{parameter.name}", error)
                        return

    def _check_pieces(self, where: str, kind: str, value: Any) -> None:
        """Look at the tables of pieces in `value`: one, a table of them by role, or a list of either."""
        if isinstance(value, list):
            for i, one in enumerate(value):
                self._check_pieces(f"{where}[{i}]", kind, one)
        elif not isinstance(value, Mapping):
            return
        elif kind == "heads":
            self._check_keys(where, _without(read_parameters(HEAD), "task"), value)
        elif kind == "segments" or "model" in value or "fusion" in value:
            around = _without(read_parameters(SEGMENT), "module") if kind == "segments" else {}
            self._check_piece(where, around, value)
        else:
            for role, one in value.items():
                if isinstance(one, (Mapping, list)):
                    self._check_pieces(f"{where}.{role}", kind, one)

    def _check_piece(self, where: str, around: Mapping[str, StaticParameter], table: Mapping[str, Any]) -> None:
        own = {"model": Parameter("model", str, None), "width": Parameter("width", int, None)}
        if "fusion" in table:
            own = {"fusion": Parameter("fusion", str, None)}
        name = table.get("model")
        if "fusion" not in table and (not isinstance(name, str) or ":" in name):
            return
        found = {} if "fusion" in table else self._find(f"{where}.model", "models", str(name))
        if found is not None:
            readable = {key: one for key, one in found.items() if "Path" not in str(one.hint)}
            plain = {key: replace(one, default=None) for key, one in around.items()}
            self._check_values(where, {**plain, **own, **readable}, table, ())


def _without(found: Mapping[str, StaticParameter] | None, name: str) -> dict[str, StaticParameter]:
    return {key: one for key, one in (found or {}).items() if key != name}


def _tables(raw: Mapping[str, Any], key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield place and content of every table under `key`; what is none is left to the schema."""
    given = raw.get(key)
    if isinstance(given, Mapping):
        yield key, given
    elif isinstance(given, list) and len(given) <= schema.TABLES:
        yield from ((f"{key}[{i}]", one) for i, one in enumerate(given) if isinstance(one, Mapping))


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
