"""The `[[method]]` tables of a study: a federated method on the schedule, or none; lists give a grid.

Where a method takes a model of its own, a table of a piece stands for it: `meme = {model = "mlp", hidden = [8]}`; it
reads whole rows, and is as wide as the labels need or as its `width` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitfed.core.errors import unknown
from splitfed.core.topology import Topology
from splitfed.registry import TABLES, load
from splitfed.study.config import topology_tables
from splitfed.study.config.cell import MethodSetting, NamedAlgorithm
from splitfed.study.config.lookup import can_construct, look_up_algorithm
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.parameters import Parameter, combinations, parameters_of, piece_kind
from splitfed.study.config.schema import MethodTable

Table = dict[str, Any]


def expand_table(mistakes: Mistakes, where: str, table: MethodTable) -> tuple[Table, list[tuple[Table, MethodSetting]]]:
    """Return the table with defaults, and every setting of its grid with the table that means it alone."""
    if table.name == "none":
        for key in table.extra:
            mistakes.add(f"{where}.{key}", unknown("key", key, ["name"]))
        return {"name": "none"}, [({"name": "none"}, MethodSetting(where))]
    models = {key: table.extra[key] for key in _model_parameters(table.name) if key in table.extra}
    plain = {key: value for key, value in table.extra.items() if key not in models}
    own = mistakes.fresh()
    for key in _topology_parameters(table.name):
        if key in plain:
            own.add(f"{where}.{key}", f"cannot be written in a study; {table.name} takes it from Python alone")
    written, points = look_up_algorithm(own, where, "methods", table.name, plain, grid=True)
    choices = {key: topology_tables.expand_piece_table(own, f"{where}.{key}", value) for key, value in models.items()}
    mistakes.take(own)
    if own:
        return {"name": table.name, **written}, []
    settings = []
    fitting = [point for point in points if can_construct(mistakes, where, "methods", point)]
    axes: list[Sequence[Any]] = [fitting, *(choice.points for choice in choices.values())]
    for point, *chosen in combinations(mistakes, where, axes):
        full = {**point.parameters, **{key: one.full for key, one in zip(choices, chosen, strict=True)}}
        in_label = {**point.label_values, **{key: one.in_label for key, one in zip(choices, chosen, strict=True)}}
        named = NamedAlgorithm(point.name, full, in_label)
        settings.append(({"name": named.name, **named.parameters}, MethodSetting(where, named)))
    return {"name": table.name, **written, **{key: choice.written for key, choice in choices.items()}}, settings


def _model_parameters(name: str) -> list[str]:
    """Return the parameters of a method that are models."""
    return [key for key, parameter in _parameters(name).items() if piece_kind(parameter.hint) == "piece"]


def _topology_parameters(name: str) -> list[str]:
    """Return the parameters of a method that are whole topologies."""
    return [key for key, parameter in _parameters(name).items() if Topology in getattr(parameter.hint, "__args__", ())]


def _parameters(name: str) -> dict[str, Parameter]:
    return parameters_of(load("methods", name)) if name in TABLES["methods"] else {}
