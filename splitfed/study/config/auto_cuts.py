"""Puts the submodules that a topology cuts after in the place of `cut = "auto"`, so that every run names its cuts.

The rule of `splitfed.topologies.auto_cuts` is applied once for each topology of a study, to the model of its first run.
The configuration of a run, which its folder keeps, states the names; labels say that they were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Dataset
from splitfed.study.config import build
from splitfed.study.config.assembly import PieceError
from splitfed.study.config.grid import Grid
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import RunSpec, TopologySetting, format_value
from splitfed.topologies.auto_cuts import AUTO

KEYS = ("cut", "cuts")


def name_auto_cuts(mistakes: Mistakes, grid: Grid, data: Dataset) -> Grid:
    """Return `grid` with names in place of "auto" in every run; a model without such a place is noted as a mistake."""
    chosen: dict[str, TopologySetting] = {}
    cells = []
    for cell in grid.cells:
        label = cell.topology.builder.label
        if label not in chosen and _asked(cell.topology.builder.parameters) is not None:
            chosen[label] = cell.topology
            try:
                chosen[label] = _with_names(cell, data)
            except PieceError as error:
                mistakes.add(f"{cell.topology.where}.{error.path}", error)
            except InvalidInput as error:
                mistakes.add(error.part or cell.topology.where, error)
        cells.append(_placed(cell, chosen.get(label, cell.topology)))
    return replace(grid, cells=tuple(cells))


def _asked(parameters: Mapping[str, Any]) -> str | None:
    """Return the parameter that leaves the cuts to the rule, None where there is none."""
    return next((key for key in KEYS if parameters.get(key) == AUTO), None)


def _with_names(cell: RunSpec, data: Dataset) -> TopologySetting:
    """Return the topology of `cell` with the names that its builder has chosen."""
    setting, built = cell.topology, build.topology(cell, data)
    key = _asked(setting.builder.parameters)
    original = built.segments[0].original
    if key is None or original is None or not built.cut_choice:
        return setting
    names: Any = original.cuts[0] if key == "cut" else list(original.cuts)
    builder = replace(
        setting.builder,
        parameters={**setting.builder.parameters, key: names},
        label_values={**setting.builder.label_values, key: f"{AUTO}: {format_value(names)}"},
    )
    return replace(setting, builder=builder, cut_choice=built.cut_choice)


def _placed(cell: RunSpec, setting: TopologySetting) -> RunSpec:
    if setting is cell.topology:
        return cell
    own = replace(setting, where=cell.topology.where)
    return replace(cell, topology=own, config={**cell.config, "topology": [own.builder.table]})
