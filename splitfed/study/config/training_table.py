"""The `[training]` table of a study: schedules, optimizers, speeds and counts, as the arguments of `splitfed.train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.local_update import LocalUpdate
from splitfed.core.messages import Recording
from splitfed.core.optimizer_arguments import options_of
from splitfed.core.optimizers import Optim
from splitfed.core.parameter_groups import ParameterGroup
from splitfed.core.topology import Topology
from splitfed.costs.clock import party_names
from splitfed.costs.speeds import Speeds
from splitfed.engines.base import FED
from splitfed.schedules.base import Schedule
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.run_spec import TrainingPlan
from splitfed.study.config.schema import TrainingTable
from splitfed.study.config.values import read_table


def read_training(reader: StudyReader, table: TrainingTable, batch_size: int | tuple[int, ...]) -> TrainingPlan | None:
    """Return how the runs of a study train, all but their schedule; None after a mistake."""
    with reader.mistakes.part() as own:
        optimizer = _read_optimizers(replace(reader, mistakes=own), table.optimizer)
        record = read_table(own, "training.record", Recording, table.record or {})
        speeds = None if table.speeds is None else read_table(own, "training.speeds", Speeds, table.speeds)
        if own or record is None or optimizer is None:
            return None
        named = ("rounds", "evaluate_every", "device", "delta", "across", "keep")
        local = LocalUpdate(**{one.name: getattr(table, one.name) for one in fields(LocalUpdate)})
        rest = {name: getattr(table, name) for name in named}
        return TrainingPlan(
            optimizer,
            batch_size=batch_size,
            local=local,
            record=record,
            speeds=speeds,
            # A reader of the report looks for the learning rate first: the default is written out.
            optimizer_table=table.optimizer or {"name": Optim().name, **Optim().options},
            **rest,
        )


def list_schedules(mistakes: Mistakes, given: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the tables of the schedules that stand in `training.schedule`, lists in them kept, with their places."""
    where, single = "training.schedule", not isinstance(given, list)
    found: list[tuple[str, Mapping[str, Any]]] = []
    if given == []:
        mistakes.add(where, "[] is not allowed; expected at least one schedule")
    for i, one in enumerate([given] if single else given):
        place = where if single else f"{where}[{i}]"
        if isinstance(one, (str, Mapping)):
            found.append((place, {"name": one} if isinstance(one, str) else one))
        else:
            wrong = f"{short_repr(one)} is not allowed; expected a name, a table with a name, or a list of those"
            mistakes.add(place, wrong)
    return found


def _read_optimizers(reader: StudyReader, table: Mapping[str, Any]) -> Optim | dict[str, Optim] | None:
    """Return the optimizers as `train` takes them, one for all roles or a role each; None after a mistake."""
    if not table:
        return Optim()
    if all(isinstance(value, Mapping) and key != "scheduler" for key, value in table.items()):
        found = {role: _read_optimizer(reader, f"training.optimizer.{role}", own) for role, own in table.items()}
        return {role: optim for role, optim in found.items() if optim is not None}
    return _read_optimizer(reader, "training.optimizer", table)


def _read_optimizer(reader: StudyReader, where: str, table: Mapping[str, Any]) -> Optim | None:
    """Return what `{name, lr, ..., clip_norm, groups = [...], scheduler = {name, every, ...}}` means.

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
        return Optim(kind, options, rest.pop("name", None), rest, every, clip_norm, groups)
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


OPTIMIZER = ("name", "scheduler", "clip_norm", "groups")
"""Keys of an optimizer's table beside the options of the optimizer."""


class PartyNames:
    """The parties of one run and their roles: those of the topology, and the aggregation server where there is one.

    `aggregated`: whether a federated method brings one.
    """

    def __init__(self, topology: Topology, schedule: Schedule, clients: int, aggregated: bool = False) -> None:
        replicas = party_names(topology, clients)
        others = [FED] if aggregated or schedule.placement(topology).averaged else []
        self.parties = {*others, *(party for names in replicas.values() for party in names.values())}
        self.roles = {*others, *topology.roles}

    def recording(self, record: Recording) -> Recording:
        """Return `record` without the parties that this run does not have, but another of its study may."""
        return replace(record, parties=tuple(name for name in record.parties if name in self.parties))

    def of(self, speeds: Speeds | None) -> Speeds | None:
        """Return `speeds` without those of parties that this run does not have, but another of its study may."""
        if speeds is None:
            return None
        return replace(
            speeds,
            named={name: machine for name, machine in speeds.named.items() if name in self.parties | self.roles},
            stragglers={name: factor for name, factor in speeds.stragglers.items() if name in self.parties},
        )
