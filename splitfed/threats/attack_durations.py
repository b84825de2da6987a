"""How long an attack is about to take here, told before it begins: a little of its work is done and timed.

The attack gets what it would get, and does as much of its work as stands out from the jitter of the clock; what it
finds is thrown away. From no doubling to all of them, and from the faster to the slower of two measurements, is a
range. Floors, oracles and scores beside the attack are left out.
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
"""Parameters that are the whole work of an attack that has one of them, as a whole number."""

_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class AttackDuration:
    """About how many seconds `attack` takes here, on this machine as it is: between `least` and `most`."""

    attack: str
    least: float
    most: float

    def __str__(self) -> str:
        """Tell it in a line."""
        length, unit = next(((span, name) for span, name in _UNITS if self.most >= span), (1.0, "s"))
        low, high = (f"{seconds / length:.2g}" for seconds in (self.least, self.most))
        return f"{self.attack}: about {high if low == high else f'{low} to {high}'} {unit} here"


def plan_attack(
    evaluator: Evaluator, request: AttackRequest, clock: Callable[[], float] = time.perf_counter
) -> AttackDuration | None:
    """Return about how long the attack takes by `clock`; None where it does not say what its work is.

    Raises what the attack is refused for.
    """
    view, knowledge = evaluator.prepare_attack(request)
    with torch.enable_grad(), stream(request.seed, knowledge.device):
        seconds = [work.seconds(clock) for work in work_of(request.attack, view, knowledge)]
    if not seconds:
        return None
    return AttackDuration(request.name, sum(least for least, _ in seconds), sum(most for _, most in seconds))


def work_of(attack: Attack, view: View, knowledge: Knowledge) -> Sequence[Work | OneOf]:
    """Return the work of `attack`: what it says, or its one parameter in `SIZES`; nothing where that is unclear."""
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
