"""The `[training]` table of a study: schedules, optimizers, speeds and counts, as the arguments of `splitfed.train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.study.config import speeds_table
from splitfed.study.config.cell import NamedAlgorithm, TrainingPlan
from splitfed.study.config.lookup import can_construct, look_up_algorithm, take_name
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.schema import TrainingTable

Training = tuple[dict[str, Any], TrainingPlan]
"""A `[training]` table with one schedule, and what it means."""


def expand_table(mistakes: Mistakes, table: TrainingTable) -> tuple[dict[str, Any], list[Training]]:
    """Return the table with defaults, and each schedule of it with the table that means it alone."""
    optimizer = _parse_optimizers(mistakes, table.optimizer)
    recorded = table.record
    record = Recording() if recorded is None else Recording(tuple(recorded.parties), recorded.every, recorded.budget)
    speeds_written, speeds = speeds_table.parse_speeds(mistakes, "training.speeds", table.speeds)
    schedules_written, schedules = _expand_schedules(mistakes, table.schedule)
    resolved = table.model_dump()
    resolved["schedule"] = schedules_written
    resolved["optimizer"] = (
        {role: _optimizer_table(optim) for role, optim in optimizer.items()}
        if isinstance(optimizer, Mapping)
        else _optimizer_table(optimizer)
    )
    resolved["speeds"] = speeds_written
    counts = (table.rounds, table.batch_size, table.local_epochs, table.evaluate_every)
    return resolved, [
        (
            {**resolved, "schedule": {"name": s.name, **s.parameters}},
            TrainingPlan(
                s,
                optimizer,
                *counts,
                table.device,
                record,
                speeds,
                where,
                table.sampling,
                table.delta,
                table.across,
                table.restart_optimizers,
                table.starts,
            ),
        )
        for where, s in schedules
    ]


def _expand_schedules(
    mistakes: Mistakes, given: Any
) -> tuple[dict[str, Any] | list[dict[str, Any]], list[tuple[str, NamedAlgorithm]]]:
    """Return one schedule, or a list of them, as written, and every point of their grids with its place."""
    where = "training.schedule"
    if not isinstance(given, list):
        return _expand_schedule(mistakes, where, given)
    if not given:
        mistakes.add(where, "[] is not allowed; expected at least one schedule")
    found = [_expand_schedule(mistakes, f"{where}[{i}]", one) for i, one in enumerate(given)]
    written = [table for table, _ in found]
    return written[0] if len(written) == 1 else written, [point for _, points in found for point in points]


def _expand_schedule(
    mistakes: Mistakes, where: str, given: Any
) -> tuple[dict[str, Any], list[tuple[str, NamedAlgorithm]]]:
    if not isinstance(given, (str, Mapping)):
        mistakes.add(
            where, f"{short_repr(given)} is not allowed; expected a name, a table with a name, or a list of those"
        )
        return {}, []
    name, rest = take_name(mistakes, where, {"name": given} if isinstance(given, str) else given)
    if name is None:
        return {}, []
    written, points = look_up_algorithm(mistakes, where, "schedules", name, rest, grid=True)
    return {"name": name, **written}, [
        (where, point) for point in points if can_construct(mistakes, where, "schedules", point)
    ]


def _parse_optimizers(mistakes: Mistakes, table: Mapping[str, Any]) -> Optim | dict[str, Optim]:
    """One table for all roles, or a table a role."""
    if not table:
        return Optim()
    if all(isinstance(value, Mapping) and key != "scheduler" for key, value in table.items()):
        pairs = {role: _parse_optimizer(mistakes, f"training.optimizer.{role}", own) for role, own in table.items()}
        return {role: optim for role, optim in pairs.items() if optim is not None}
    return _parse_optimizer(mistakes, "training.optimizer", table) or Optim()


def _parse_optimizer(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Optim | None:
    """Return `{name, lr, ..., scheduler = {name, ...}}` as an `Optim`; torch refuses what it does not know."""
    options = dict(table)
    name, scheduler = options.pop("name", "SGD"), options.pop("scheduler", None)
    rest = dict(scheduler) if isinstance(scheduler, Mapping) else {"name": scheduler}
    own = mistakes.fresh()
    with own.at(where):
        for text in (name, *([] if scheduler is None else [rest.get("name")])):
            if not isinstance(text, str):
                raise InvalidInput(f"name={short_repr(text)} is not allowed; expected text")
        return Optim(name, options, rest.pop("name", None), rest)
    mistakes.take(own)
    return None


def _optimizer_table(optim: Optim) -> dict[str, Any]:
    scheduler = {"scheduler": {"name": optim.scheduler, **optim.scheduler_options}} if optim.scheduler else {}
    return {"name": optim.name, **optim.options, **scheduler}
