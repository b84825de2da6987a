"""Puts the submodules that a topology cuts after in the place of `cut = "auto"`, so that every run names its cuts.

The rule of `splitfed.topologies.auto_cuts` is applied once for each topology of a study, to the model of its first run.
The configuration of a run, which its folder keeps, states the names; labels say that they were chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Dataset
from splitfed.study.config import build
from splitfed.study.config.assembly import PieceError
from splitfed.study.config.grid import Grid
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import NamedAlgorithm, RunSpec, format_value
from splitfed.study.config.schema import CUT_KEYS
from splitfed.topologies.auto_cuts import AUTO


def name_auto_cuts(mistakes: Mistakes, grid: Grid, data: Dataset) -> Grid:
    """Return `grid` with names in place of "auto" in every run; a model without such a place is noted as a mistake."""
    chosen: dict[str, tuple[NamedAlgorithm, str]] = {}
    cells = []
    for cell in grid.cells:
        label, builder = cell.topology.label, cell.topology.part
        if label not in chosen:
            chosen[label] = builder, cell.cut_choice
            if (key := next((key for key in CUT_KEYS if builder.parameters.get(key) == AUTO), None)) is not None:
                try:
                    chosen[label] = _with_names(cell, key, data)
                except PieceError as error:
                    mistakes.add(f"{cell.topology.where}.{error.path}", error)
                except InvalidInput as error:
                    mistakes.add(error.part or cell.topology.where, error)
        builder, why = chosen[label]
        cells.append(replace(cell, topology=replace(cell.topology, parts=(builder,)), cut_choice=why))
    return replace(grid, cells=tuple(cells))


def _with_names(cell: RunSpec, key: str, data: Dataset) -> tuple[NamedAlgorithm, str]:
    """Return the builder of `cell` with the names that it has chosen for its parameter `key`, and why it has."""
    builder, built = cell.topology.part, build.topology(cell, data)
    original = built.segments[0].original
    if original is None or not built.cut_choice:
        return builder, cell.cut_choice
    names: Any = original.cuts[0] if key == "cut" else list(original.cuts)
    parameters = {**builder.parameters, key: names}
    told = {**builder.label_values, key: f"{AUTO}: {format_value(names)}"}
    return replace(builder, parameters=parameters, label_values=told), built.cut_choice
