"""The `[training]` table of a study: schedules, optimizers, speeds and counts, as the arguments of `splitfed.train`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from splitfed.core.errors import InvalidInput, check_count, check_names
from splitfed.core.local_update import LocalUpdate
from splitfed.core.messages import Recording
from splitfed.core.optimizer_arguments import options_of
from splitfed.core.optimizers import Optim
from splitfed.core.parameter_groups import ParameterGroup
from splitfed.core.topology import Topology
from splitfed.costs.clock import party_names
from splitfed.costs.speeds import Machine, Speeds
from splitfed.engines.base import FED
from splitfed.schedules.base import Schedule
from splitfed.study.config.algorithm_tables import expand_table
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.parameters import check_parameters, parameters_of
from splitfed.study.config.run_spec import NamedAlgorithm, TrainingPlan
from splitfed.study.config.schema import TrainingTable


def expand_training(reader: StudyReader, table: TrainingTable) -> tuple[dict[str, Any], list[TrainingPlan]]:
    """Return the table with defaults, and the plan with each of its schedules."""
    mistakes, recorded = reader.mistakes, table.record
    optimizer_written, optimizer = _parse_optimizers(reader, table.optimizer)
    record = Recording() if recorded is None else Recording(tuple(recorded.parties), recorded.every, recorded.budget)
    speeds_written, speeds = parse_speeds(mistakes, "training.speeds", table.speeds)
    schedules_written, schedules = _expand_schedules(reader, table.schedule)
    resolved = table.model_dump() | {
        "schedule": schedules_written,
        "optimizer": optimizer_written,
        "speeds": speeds_written,
    }
    plain = {
        name: getattr(table, name) for name in ("rounds", "batch_size", "evaluate_every", "device", "delta", "across")
    }
    own = {one.name: getattr(table, one.name) for one in fields(LocalUpdate)}
    local = LocalUpdate()
    with mistakes.blaming("training", own):
        local = LocalUpdate(**own)
    return resolved, [
        TrainingPlan(schedule, optimizer, record=record, speeds=speeds, where=where, local=local, **plain)
        for where, schedule in schedules
    ]


def _expand_schedules(reader: StudyReader, given: Any) -> tuple[Any, list[tuple[str, NamedAlgorithm]]]:
    """Return one schedule, or a list of them, as written, and every point of their grids with its place."""
    where, single = "training.schedule", not isinstance(given, list)
    written: list[dict[str, Any]] = []
    found: list[tuple[str, NamedAlgorithm]] = []
    if given == []:
        reader.mistakes.add(where, "[] is not allowed; expected at least one schedule")
    for i, one in enumerate([given] if single else given):
        place = where if single else f"{where}[{i}]"
        if not isinstance(one, (str, Mapping)):
            reader.mistakes.add(
                place, f"{short_repr(one)} is not allowed; expected a name, a table with a name, or a list of those"
            )
            continue
        table, points = expand_table(reader, place, "schedules", {"name": one} if isinstance(one, str) else one)
        written.append(table)
        found += [(place, point) for point in points]
    return written[0] if len(written) == 1 else written, found


def _parse_optimizers(reader: StudyReader, table: Mapping[str, Any]) -> tuple[dict[str, Any], Optim | dict[str, Optim]]:
    """Return as written, with defaults, and as `train` takes it: one table for all roles, or a table a role."""
    if not table:
        return _optimizer_table("SGD", Optim()), Optim()
    if all(isinstance(value, Mapping) and key != "scheduler" for key, value in table.items()):
        parsed = {role: _parse_optimizer(reader, f"training.optimizer.{role}", own) for role, own in table.items()}
        found = {role: one for role, one in parsed.items() if one is not None}
        return {role: text for role, (text, _) in found.items()}, {role: optim for role, (_, optim) in found.items()}
    return _parse_optimizer(reader, "training.optimizer", table) or ({}, Optim())


def _parse_optimizer(reader: StudyReader, where: str, table: Mapping[str, Any]) -> tuple[dict[str, Any], Optim] | None:
    """Return `{name, lr, ..., clip_norm, groups = [...], scheduler = {name, every, ...}}`, and the `Optim` it means.

    A name with a colon is an import path, to a subclass of `torch.optim.Optimizer` or a function of the study's folder.
    """
    mistakes, options = reader.mistakes, dict(table)
    name, scheduler = options.pop("name", "SGD"), options.pop("scheduler", None)
    rest = dict(scheduler) if isinstance(scheduler, Mapping) else {"name": scheduler}
    with mistakes.at(where):
        if not isinstance(name, str):
            raise InvalidInput(f"name={short_repr(name)} is not allowed; expected text")
        if scheduler is not None and not isinstance(rest.get("name"), str):
            raise InvalidInput(
                f"scheduler={short_repr(scheduler)} is not allowed; expected a name, or a table with one such as "
                '{name = "StepLR", step_size = 10}'
            )
        if ":" not in name:
            check_names(f"option of optimizer {name}", [*OPTIMIZER, *options_of(name)], *table)
        clip_norm, every = options.pop("clip_norm", None), rest.pop("every", "round")
        groups = _parse_groups(options.pop("groups", []))
        kind: Any = name
        if ":" in name and (kind := reader.find(f"{where}.name", "optimizers", name)) is None:
            return None
        optim = Optim(kind, options, rest.pop("name", None), rest, every, clip_norm, groups)
        return _optimizer_table(name, optim), optim
    return None


def _parse_groups(given: Any) -> tuple[ParameterGroup, ...]:
    """Return the parameter groups of tables `{match, max_dims, ...}` with options of the optimizer beside."""
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise InvalidInput(
            f"groups={short_repr(given)} is not allowed; expected tables such as "
            '[{match = "*.bias", weight_decay = 0.0}]'
        )
    groups = []
    for one in given:
        options = dict(one)
        if not options.keys() & {"match", "max_dims"}:
            raise InvalidInput(f"groups={short_repr(given)} is not allowed; expected match or max_dims in each of them")
        match = options.pop("match", "*")
        groups.append(ParameterGroup(match, max_dims=options.pop("max_dims", None), options=options))
    return tuple(groups)


def _optimizer_table(name: str, optim: Optim) -> dict[str, Any]:
    every = {} if optim.scheduler_every == "round" else {"every": optim.scheduler_every}
    scheduler = {"scheduler": {"name": optim.scheduler, **optim.scheduler_options, **every}} if optim.scheduler else {}
    clip = {} if optim.clip_norm is None else {"clip_norm": optim.clip_norm}
    groups = [
        {
            "match": list(group.match),
            **({} if group.max_dims is None else {"max_dims": group.max_dims}),
            **group.options,
        }
        for group in optim.groups
    ]
    return {"name": name, **optim.options, **clip, **({"groups": groups} if groups else {}), **scheduler}


OPTIMIZER = ("name", "scheduler", "clip_norm", "groups")
"""Keys of an optimizer's table beside the options of the optimizer."""
EXAMPLE = "{compute = 1e9, up = 1e6, down = 1e6, latency = 0.01}"


def parse_speeds(mistakes: Mistakes, where: str, given: Any) -> tuple[dict[str, Any] | None, Speeds | None]:
    """Return the table `given` with its defaults, and the `Speeds` it describes; None for both without a table."""
    if given is None:
        return None, None
    allowed = parameters_of(Speeds)
    with mistakes.part() as own:
        table = _check_table(own, where, given, f"default = {EXAMPLE}")
        rest = {key: value for key, value in table.items() if key not in ("default", "named")}
        plain = {name: allowed[name] for name in ("stragglers", "spread", "seed")}
        found = check_parameters(own, where, plain, rest, keys=["default", "named"])
        default_written, default = _parse_machine(own, f"{where}.default", table.get("default", {}))
        each = _check_table(own, f"{where}.named", table.get("named", {}), f"server = {EXAMPLE}")
        machines = {name: _parse_machine(own, f"{where}.named.{name}", one) for name, one in each.items()}
        speeds = None
        if not own:
            with own.at(where):
                check_count("seed", found.points[0].full["seed"], high=math.inf)
                speeds = Speeds(default, {name: one for name, (_, one) in machines.items()}, **found.points[0].full)
    return {"default": default_written, "named": {n: w for n, (w, _) in machines.items()}, **found.written}, speeds


class PartyNames:
    """The parties of one run and their roles: those of the topology, and the aggregation server where there is one.

    `aggregated`: whether a federated method brings one.
    """

    def __init__(self, topology: Topology, schedule: Schedule, clients: int, aggregated: bool = False) -> None:
        replicas = party_names(topology, clients)
        others = [FED] if aggregated or schedule.placement(topology).averaged else []
        self.parties = {*others, *(party for names in replicas.values() for party in names.values())}
        self.roles = {*others, *topology.roles}

    def of(self, speeds: Speeds | None) -> Speeds | None:
        """Return `speeds` without those of parties that this run does not have, but another of its study may."""
        if speeds is None:
            return None
        return replace(
            speeds,
            named={name: machine for name, machine in speeds.named.items() if name in self.parties | self.roles},
            stragglers={name: factor for name, factor in speeds.stragglers.items() if name in self.parties},
        )


def _parse_machine(mistakes: Mistakes, where: str, given: Any) -> tuple[dict[str, Any], Machine]:
    machine = Machine()
    with mistakes.part() as own:
        table = _check_table(own, where, given, EXAMPLE.strip("{}"))
        found = check_parameters(own, where, parameters_of(Machine), table)
        if not own:
            with own.at(where):
                machine = Machine(**found.points[0].full)
    return found.written, machine


def _check_table(mistakes: Mistakes, where: str, given: Any, example: str) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    mistakes.add(where, f"{short_repr(given)} is not allowed; expected a table such as {{{example}}}")
    return {}
