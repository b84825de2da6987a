"""Malicious optimizer: a party of a vertical run scales up gradients that keep their sign from step to step.

Paper: Fu, Zhang, Ji, Chen, Wu, Guo, Zhou, Liu, Wang, "Label inference attacks against vertical federated learning",
USENIX Security 2022 (active attack: the malicious local optimizer).

Before every optimizer step each number g of the party's weight gradient is multiplied by clamp(1 + gain g / (g' +
1e-7), low, high), g' being its scaled value in the previous step. So the top relies more on this party's bottom, and
the bottom has more information about the labels, which `model_completion` then uses. Messages are computed honestly,
with the weights so trained. Deviation: the authors scale the gradient after momentum, and in the moving average itself.
As published, that average is multiplied by 1.9 times .9 in every step and diverges; so here the gradient is scaled
before the party's own optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_number, require_number, unknown
from splitfed.core.party import Party
from splitfed.data.dataset import Federation
from splitfed.engines.observers import Observable
from splitfed.poisoning.base import HonestObserver, Poisoning, check_free

_LEAST = 1e-7  # added to what is divided by


@dataclass(frozen=True, kw_only=True)
class MaliciousOptimizer(Poisoning):
    """The role `party` scales its weight gradients by factors between `low` and `high`; `gain` weighs their ratio."""

    party: str
    gain: float = field(default=1.0, metadata=require_number("malicious_optimizer gain", low=0.0, open_low=True))
    low: float = field(default=1.0, metadata=require_number("malicious_optimizer low", low=0.0, open_low=True))
    high: float = 5.0

    def __post_init__(self) -> None:
        """Raise `InvalidInput` unless gain > 0 and 0 < low <= high."""
        super().__post_init__()
        check_number("malicious_optimizer high", self.high, low=self.low)

    def enter(self, engine: Observable, data: Federation) -> None:
        """Install the scaling at the party's optimizer.

        Raises `InvalidInput` for a party without weights or with labels.
        """
        topology = engine.topology
        if self.party not in topology.inputs.values():
            raise unknown("party of a malicious optimizer:", self.party, dict.fromkeys(topology.inputs.values()))
        if self.party in {head.labels for head in topology.heads}:
            raise InvalidInput(f"MaliciousOptimizer is for a party without labels; {self.party!r} holds them")
        for client in self.clients:
            party = engine.party(client, self.party)
            if party.state.optimizer is None:
                raise InvalidInput(f"MaliciousOptimizer changes a party's training; {party.name!r} trains no weight")
            check_free(engine, party.name, "a malicious optimizer")
            engine.join(party.name, _Scaler(self, party))

    def scale(self, gradient: Tensor, before: Tensor) -> Tensor:
        """Return the factor of each number of the gradient, given the scaled gradient `before` it: same shape."""
        return (1 + self.gain * gradient / (before + _LEAST)).clamp(self.low, self.high)


class _Scaler(HonestObserver):
    """Scales one party's gradients before its optimizer step."""

    def __init__(self, plan: MaliciousOptimizer, party: Party) -> None:
        assert party.state.optimizer is not None
        self._plan, self._device = plan, party.device
        self._before: dict[str, Tensor] = {}
        self._sum, self._count = 0.0, 0
        party.state.optimizer.register_step_pre_hook(self._step)

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for number, weight in enumerate([p for group in optimizer.param_groups for p in group["params"]]):
            if weight.grad is None:
                continue
            before = self._before.get(str(number))
            if before is not None:
                factor = self._plan.scale(weight.grad, before)
                weight.grad = weight.grad * factor
                self._sum += float(factor.mean())
                self._count += 1
            self._before[str(number)] = weight.grad.detach().clone()

    def metrics(self) -> dict[str, Any]:
        """Return the mean factor of the round, over weights and steps; None if no gradient was scaled."""
        found = self._sum / self._count if self._count else None
        self._sum, self._count = 0.0, 0
        return {"factor": found}

    def state(self) -> dict[str, Any]:
        """Return the gradients of the previous step."""
        return {"before": {name: g.clone() for name, g in self._before.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state`."""
        self._before = {name: g.to(self._device) for name, g in state["before"].items()}
        self._sum, self._count = 0.0, 0
