"""Knowledge that ends an attack at its first use: to find out what the attack refuses before it takes time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from splitfed.attacks.knowledge import Knowledge, access_table
from splitfed.attacks.local_models import Clone, TrainedAttack


class AttackBegun(Exception):
    """An attack has begun: it refused nothing before the first thing that takes time."""


def stop_attack(*given: Any) -> NoReturn:
    """End the attack that calls this."""
    raise AttackBegun


class _Idle:
    """A clone with its weights, which ends the attack that uses it."""

    __call__ = sample = in_training = staticmethod(stop_attack)

    def __init__(self, clone: Clone) -> None:
        self.parameters, self.modules = clone.parameters, clone.modules
        self.defenses, self.least_rows = clone.defenses, clone.least_rows


class _IdleTrainingAttack:
    """Ends the attack which asks a training attack."""

    predict = staticmethod(stop_attack)

    def __init__(self, trained: TrainedAttack) -> None:
        self.plan = trained.plan

    def copy(self) -> _IdleTrainingAttack:
        """Return itself: it has nothing that could be changed."""
        return self


STAND_INS: dict[str, Callable[[Any], Any]] = {
    "architecture": lambda draw: lambda seed: _Idle(draw(seed)),
    "training_attack": _IdleTrainingAttack,
}
"""What takes the place of a field that ends an attack only later than at its first call."""


def stop_at_first_use(knowledge: Knowledge) -> Knowledge:
    """Return `knowledge` with everything in it that computes replaced by what ends the attack."""
    table = access_table(type(knowledge))
    held = {name: getattr(knowledge, name) for name, access in table.items() if access.computes}
    return replace(
        knowledge,
        **{n: STAND_INS[n](value) if n in STAND_INS else stop_attack for n, value in held.items() if value is not None},
    )
