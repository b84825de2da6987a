"""A round of a federated method around that of the schedule: who is asked before it, and who has finished after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitfed.engines.base import Trainer
from splitfed.engines.mean import shares
from splitfed.federated.base import Learner, Method
from splitfed.schedules.base import Round, Schedule, Training
from splitfed.schedules.sampling import Sampled, taking_part


def query(
    method: Method,
    learners: Sequence[Learner],
    schedule: Schedule,
    trainer: Trainer,
    training: Training,
    number: int,
    state: dict[str, Any],
) -> None:
    """Let `method` tell the clients that `schedule` will ask in round `number` what they need."""
    asked: Sequence[int] = range(trainer.lanes)
    if isinstance(schedule, Sampled):
        asked = taking_part(schedule.turns(trainer, training, number))
    method.query([learners[lane] for lane in asked], number, state)


def fuse(method: Method, learners: Sequence[Learner], done: Round, number: int, state: dict[str, Any]) -> None:
    """Let `method` take from the clients that finished the round `done`; nothing where there were too few."""
    finished = [learners[lane] for lane in done.clients if lane not in done.dropped]
    if finished and done.fused:
        method.fuse(finished, shares({one.lane: float(one.rows()) for one in finished}), number, state)
