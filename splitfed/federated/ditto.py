"""Ditto: beside the averaged model every client trains one of its own, held near the averaged one.

Paper: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021, algorithm
1.

The averaged model is trained as in FedAvg. The client's own one gets weight (v - w_round) added to its gradient, where
w_round is what the client was sent at the start of the round. Both train on the same batches, where the paper lets the
client draw others for its own model. With weight = 0 the client's own model is that of a client alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from splitfed.core.errors import check_number
from splitfed.core.local_objective import LocalObjective
from splitfed.federated.base import Learner, ObjectivePlacement, State
from splitfed.federated.dual_model import PREFIX, Doubled
from splitfed.federated.objectives import NoObjective, objective_of, weights_with_gradients


@dataclass(frozen=True, kw_only=True)
class Ditto(Doubled):
    """`weight` >= 0 (the paper's lambda): how strongly a client's own model is held."""

    who: ClassVar[str] = "ditto"

    weight: float = 0.1

    def __post_init__(self) -> None:
        """Refuse a negative weight."""
        check_number("ditto weight", self.weight, low=0.0)

    @property
    def turned_off(self) -> str | None:
        """Without the pull, clients' own models learn from nobody."""
        return "ditto with weight=0 trains every client's own model alone" if self.weight == 0 else None

    def objective(self, seat: ObjectivePlacement) -> LocalObjective | None:
        """Return who holds a client's own model near the averaged one."""
        return None if seat.lane is None else Near(self.weight, self.kept(seat.topology))

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Remember what has arrived."""
        super().begin(learner, arrived, number, state)
        if objective := objective_of(learner, Near):
            objective.anchor = arrived


@dataclass
class Near(NoObjective):
    """Pulls the weights of `segments` towards those of the other model in `anchor`."""

    weight: float
    segments: tuple[str, ...]
    anchor: Mapping[str, Tensor] = field(default_factory=dict)

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Add weight (v - w) to every gradient of the client's own model."""
        for name, own in weights_with_gradients(modules, self.segments) if self.weight else ():
            assert own.grad is not None
            own.grad.add_(own.detach() - self.anchor[f"{PREFIX}_{name}"], alpha=self.weight)
