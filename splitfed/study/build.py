"""From a run's plain values to the objects it is made of: data, model, topology, defenses, attacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from splitfed.attacks.base import Attack
from splitfed.data.dataset import Dataset
from splitfed.data.federation import Federation
from splitfed.defense import Defense
from splitfed.errors import InvalidInput
from splitfed.graph import Topology
from splitfed.models.build import build
from splitfed.registry import load
from splitfed.schedules.base import Schedule
from splitfed.study.cell import Cell, Named, Probe, Source


def dataset(source: Source) -> Dataset:
    """Load the data set of `source`; the same for every seed."""
    loaded: Dataset = load("data", source.name)(**source.parameters)
    return loaded


def federation(data: Dataset, source: Source, seed: int) -> Federation:
    """Split `data` as `source` says, with the run's seed."""
    return data.clients(source.clients, **source.split, seed=seed)


def topology(cell: Cell, data: Dataset) -> Topology:
    """Make the run's model, initialised from its seed, and cut it."""
    placed = cell.topology.builder
    built: Topology = load("topologies", placed.name)(_model(cell, data), **tuples(placed.parameters))
    return built.with_task(data.task)


def _model(cell: Cell, data: Dataset) -> nn.Module:
    name, parameters = cell.model.name, cell.model.parameters
    try:
        return build(name, data.shape, data.task.outputs or 1, cell.seed, **parameters)
    except InvalidInput:
        raise
    except (RuntimeError, ValueError, TypeError, OverflowError, MemoryError) as error:
        # A width that no memory holds, or a factory of the user's own that fails.
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise InvalidInput(f"model {cell.model.label} cannot be built: {reason[0]}") from error


def defenses(cell: Cell) -> list[Defense]:
    """Make the run's defenses, in the order they act."""
    return [made("defenses", part) for part in cell.defense.parts]


def schedule(cell: Cell) -> Schedule:
    """Make the run's schedule."""
    found: Schedule = made("schedules", cell.training.schedule)
    return found


def attack(probe: Probe) -> Attack:
    """Make the attack of `probe`."""
    found: Attack = made("attacks", probe.attack)
    return found


def made(kind: str, named: Named) -> Any:
    """Construct a registered algorithm with its parameters."""
    return load(kind, named.name)(**tuples(named.parameters))


def tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with lists, which is all that TOML knows, as tuples, which frozen values hold."""
    return {key: as_tuple(value) for key, value in given.items()}


def as_tuple(value: Any) -> Any:
    """Return a list, and lists inside it, as tuples."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value
