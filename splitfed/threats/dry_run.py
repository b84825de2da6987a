"""Knowledge that ends an attack at its first use: to find out what the attack refuses before it takes time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from splitfed.attacks.base import Clone, Knowledge, Target, TrainedAttack
from splitfed.core.messages import View


class Begun(Exception):
    """An attack has begun: it refused nothing before the first thing that takes time."""


def stop_attack(*given: Any) -> NoReturn:
    """End the attack that calls this."""
    raise Begun


class _Idle:
    """A clone with its weights, which ends the attack that uses it."""

    sample = in_training = staticmethod(stop_attack)

    def __init__(self, clone: Clone) -> None:
        self.parameters, self.modules = clone.parameters, clone.modules
        self.defenses, self.least_rows = clone.defenses, clone.least_rows

    def __call__(self, x: Tensor) -> NoReturn:
        """End the attack."""
        raise Begun


class _IdleInside:
    """An insider that ends the attack which asks it."""

    def __init__(self, insider: TrainedAttack) -> None:
        self.plan = insider.plan

    def guess(self, view: View, target: Target) -> NoReturn:
        """End the attack."""
        raise Begun

    def copy(self) -> _IdleInside:
        """Return itself: it has nothing that could be changed."""
        return self


def stop_at_first_use(knowledge: Knowledge) -> Knowledge:
    """Return `knowledge` with everything in it that computes replaced by what ends the attack."""
    names = ("query", "upstream", "sample", "predict", "model", "imitate", "loss", "extractor")
    used: dict[str, Any] = {name: stop_attack for name in names if getattr(knowledge, name) is not None}
    made, insider = knowledge.architecture, knowledge.insider
    return replace(
        knowledge,
        **used,
        architecture=None if made is None else lambda seed: _Idle(made(seed)),
        insider=None if insider is None else _IdleInside(insider),
    )
