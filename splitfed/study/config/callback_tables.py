"""The tables `[[callback]]` of a study: what is called while its runs are trained, each run with one of its own.

A name is one of `CALLBACKS` or an import path to a subclass of `splitfed.training.callbacks.Callback`. Paths among its
parameters lie in the folder of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from typing import Any

from splitfed.core.errors import unknown
from splitfed.registry import resolve
from splitfed.study.config.algorithm_tables import label_parameters
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.run_spec import NamedAlgorithm
from splitfed.study.config.schema import NamedTable
from splitfed.study.config.values import holds_type, parameters_of, read_parameters

CALLBACKS: Mapping[str, str] = {
    "early_stopping": "splitfed.training.early_stopping:EarlyStopping",
    "csv": "splitfed.training.writers:CsvWriter",
    "tensorboard": "splitfed.training.writers:TensorBoardWriter",
    "wandb": "splitfed.training.writers:WandbWriter",
}
"""Name -> what it leads to."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "csv": {"path": "rounds.csv"},
    "tensorboard": {"folder": "tensorboard"},
    "wandb": {"folder": "."},
}
"""Name -> parameters that a study need not give."""

TAKEN = (
    *("run.json", "arguments.json", "environment.json", "metrics.jsonl", "rounds.json", "config.toml", "mark.json"),
    *("result.json", "previous.json", "checkpoints", "views", "attacks", "code"),
)
"""What a run keeps in its folder under these names."""


def read_callback(reader: StudyReader, where: str, table: NamedTable) -> NamedAlgorithm | None:
    """Return what a `[[callback]]` table names; None after a mistake."""
    name, values = table.name, {**DEFAULTS.get(table.name, {}), **table.extra}
    if ":" not in name and name not in CALLBACKS:
        reader.mistakes.add(f"{where}.name", unknown("callback", name, list(CALLBACKS)))
        return None
    factory: Any = None
    with reader.mistakes.at(f"{where}.name"):
        factory = resolve(CALLBACKS[name]) if name in CALLBACKS else reader.code.find(name, "callbacks")
    if factory is None:
        return None
    # Hints of a class are those of its fields, which only a dataclass is made from.
    signed: Any = factory if is_dataclass(factory) else factory.__init__
    allowed = parameters_of(signed, ("self",))
    if (given := read_parameters(reader.mistakes, where, allowed, values)) is None:
        return None
    paths = tuple(key for key, parameter in allowed.items() if holds_type(parameter.hint, Path) and key in given)
    for key in paths:
        _check_path(reader, f"{where}.{key}", given[key])
    told = label_parameters(allowed, given)
    named = NamedAlgorithm("callbacks", name, given, told, factory, dict.fromkeys(paths))
    with reader.mistakes.at(where):
        named.call(**named.parameters)
    return named


def make_callbacks(named: Sequence[NamedAlgorithm], folder: Path) -> list[Any]:
    """Make the callbacks of the run in `folder`, where their paths start."""
    made = []
    for one in named:
        paths = {key: folder / one.parameters[key] for key in one.objects}
        # `name` of a table is what is called; a page of the run elsewhere is called as the run here.
        label = {"name": folder.resolve().name} if one.name == "wandb" else {}
        made.append(one.call(**{**one.parameters, **paths, **label}))
    return made


def _check_path(reader: StudyReader, where: str, value: Any) -> None:
    """Refuse a path out of the run's folder, and one that the run itself needs."""
    path = PurePath(value) if isinstance(value, str) else None
    if path is None or path.is_absolute() or ".." in path.parts or value.startswith("~"):
        reader.mistakes.add(where, f"{value!r} is not allowed; expected a path below the folder of the run")
    elif path.parts and path.parts[0] in TAKEN:
        reader.mistakes.add(where, f"{value!r} is not allowed: the run keeps {path.parts[0]} there")
