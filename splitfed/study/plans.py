"""The `[training]` table of a study: schedule, optimizers and counts, as the arguments of `splitfed.train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitfed.errors import InvalidInput
from splitfed.optim import Optim
from splitfed.study.cell import Plan
from splitfed.study.config import TrainingTable
from splitfed.study.lookup import one
from splitfed.study.mistakes import Mistakes, shown
from splitfed.view import Recording


def plan(mistakes: Mistakes, table: TrainingTable) -> tuple[dict[str, Any], Plan | None]:
    """Return the table with defaults, and what it means."""
    given = {"name": table.schedule} if isinstance(table.schedule, str) else table.schedule
    schedule_written, schedule = one(mistakes, "training.schedule", "schedules", given)
    optimizer = _optimizers(mistakes, table.optimizer)
    recorded = table.record
    record = Recording() if recorded is None else Recording(tuple(recorded.parties), recorded.every, recorded.budget)
    resolved = table.model_dump()
    resolved["schedule"] = schedule_written
    resolved["optimizer"] = (
        {role: _written(optim) for role, optim in optimizer.items()}
        if isinstance(optimizer, Mapping)
        else _written(optimizer)
    )
    if schedule is None:
        return resolved, None
    counts = (table.rounds, table.batch_size, table.local_epochs, table.evaluate_every)
    return resolved, Plan(schedule, optimizer, *counts, table.device, record)


def _optimizers(mistakes: Mistakes, table: Mapping[str, Any]) -> Optim | dict[str, Optim]:
    """One table for all roles, or a table a role."""
    if not table:
        return Optim()
    if all(isinstance(value, Mapping) and key != "scheduler" for key, value in table.items()):
        pairs = {role: _optim(mistakes, f"training.optimizer.{role}", own) for role, own in table.items()}
        return {role: optim for role, optim in pairs.items() if optim is not None}
    return _optim(mistakes, "training.optimizer", table) or Optim()


def _optim(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Optim | None:
    """Return `{name, lr, ..., scheduler = {name, ...}}` as an `Optim`; torch refuses what it does not know."""
    options = dict(table)
    name, scheduler = options.pop("name", "SGD"), options.pop("scheduler", None)
    rest = dict(scheduler) if isinstance(scheduler, Mapping) else {"name": scheduler}
    own = mistakes.fresh()
    with own.at(where):
        for text in (name, *([] if scheduler is None else [rest.get("name")])):
            if not isinstance(text, str):
                raise InvalidInput(f"name={shown(text)} is not allowed; expected text")
        return Optim(name, options, rest.pop("name", None), rest)
    mistakes.take(own)
    return None


def _written(optim: Optim) -> dict[str, Any]:
    scheduler = {"scheduler": {"name": optim.scheduler, **optim.scheduler_options}} if optim.scheduler else {}
    return {"name": optim.name, **optim.options, **scheduler}
