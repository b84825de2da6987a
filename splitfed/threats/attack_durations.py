"""Estimates how long an attack takes on this machine by timing a small part of its work.

The attack gets its real view and knowledge and does as much of its work as exceeds the jitter of the clock; the
predictions are discarded. The estimate is a range: from no doubling to all of them, and from the faster to the slower
of two measurements. Floors, oracles and scoring are not included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from splitfed.attacks.base import Attack, Knowledge
from splitfed.attacks.work import OneOf, StatesWork, Work
from splitfed.core.messages import View
from splitfed.core.random import generator, stream
from splitfed.threats.attack_requests import AttackRequest
from splitfed.threats.evaluator import Evaluator

SIZES = ("epochs", "iterations")
"""Parameters that alone determine the work of an attack which has exactly one of them as a whole number."""

_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class AttackDuration:
    """Estimated wall-clock seconds of `attack` on this machine: between `least` and `most`."""

    attack: str
    least: float
    most: float

    def __str__(self) -> str:
        """Return the estimate as one line of text."""
        length, unit = next(((span, name) for span, name in _UNITS if self.most >= span), (1.0, "s"))
        low, high = (f"{seconds / length:.2g}" for seconds in (self.least, self.most))
        return f"{self.attack}: about {high if low == high else f'{low} to {high}'} {unit} here"


def plan_attack(
    evaluator: Evaluator, request: AttackRequest, clock: Callable[[], float] = time.perf_counter
) -> AttackDuration | None:
    """Return the estimated duration of the attack, measured by `clock`; None if its work is unknown (see `work_of`).

    Raises `InvalidInput` if the attack is refused.
    """
    view, knowledge = evaluator.prepare_attack(request)
    with torch.enable_grad(), stream(request.seed, knowledge.device):
        seconds = [work.seconds(clock) for work in work_of(request.attack, view, knowledge)]
    if not seconds:
        return None
    return AttackDuration(request.name, sum(least for least, _ in seconds), sum(most for _, most in seconds))


def work_of(attack: Attack, view: View, knowledge: Knowledge) -> Sequence[Work | OneOf]:
    """Return the units of work of `attack`; empty if they are unknown.

    They are what the attack states (`StatesWork`), else its only whole-number parameter among `SIZES`.
    """
    if isinstance(attack, StatesWork):
        return attack.work(view, knowledge)
    sized = [p for p in SIZES if type(getattr(attack, p, None)) is int]
    if len(sized) != 1:
        return ()
    (parameter,) = sized
    size = int(getattr(attack, parameter))

    def run(size: int) -> object:
        return replace(attack, **{parameter: size})(view, knowledge, generator(0, "work"))

    return (Work(run, size, size),)
