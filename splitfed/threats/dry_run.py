"""Knowledge for a dry run: it stops an attack at its first costly operation, so that only its checks run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from splitfed.attacks.knowledge import Knowledge, access_table
from splitfed.attacks.local_models import Clone, TrainedAttack


class AttackBegun(Exception):
    """Raised when an attack passed its checks and reached its first costly operation."""


def stop_attack(*given: Any) -> NoReturn:
    """Raise `AttackBegun`, whatever the arguments."""
    raise AttackBegun


class _Idle:
    """A clone whose weights can be read and whose calls raise `AttackBegun`."""

    __call__ = sample = in_training = staticmethod(stop_attack)

    def __init__(self, clone: Clone) -> None:
        self.parameters, self.modules = clone.parameters, clone.modules
        self.defenses, self.least_rows = clone.defenses, clone.least_rows


class _IdleTrainingAttack:
    """A training attack whose parameters can be read and whose `predict` raises `AttackBegun`."""

    predict = staticmethod(stop_attack)

    def __init__(self, trained: TrainedAttack) -> None:
        self.plan = trained.plan

    def copy(self) -> _IdleTrainingAttack:
        """Return the same object, as it holds no state."""
        return self


STAND_INS: dict[str, Callable[[Any], Any]] = {
    "architecture": lambda draw: lambda seed: _Idle(draw(seed)),
    "training_attack": _IdleTrainingAttack,
}
"""Field -> its replacement in a dry run, for fields that an attack may inspect before it calls them."""


def stop_at_first_use(knowledge: Knowledge) -> Knowledge:
    """Return `knowledge` in which every field that computes raises `AttackBegun` when it is used."""
    table = access_table(type(knowledge))
    held = {name: getattr(knowledge, name) for name, access in table.items() if access.computes}
    return replace(
        knowledge,
        **{n: STAND_INS[n](value) if n in STAND_INS else stop_attack for n, value in held.items() if value is not None},
    )
