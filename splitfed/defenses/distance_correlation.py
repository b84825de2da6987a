"""Distance correlation: trains the client so that its releases depend less on its inputs (NoPeek).

Paper: Vepakomma, Singh, Gupta, Raskar, "NoPeek: information leakage reduction to share activations in distributed deep
learning", ICDM workshops 2020.

The loss is (1 - alpha) CE + alpha DCOR(x, z): the paper's two weights, normalised to add up to one. Alpha is a number
or a schedule over epochs (`splitfed.core.annealing`), which both weights follow; the paper has one number for a run.

`statistic="biased"` is the paper's square-root form; "unbiased" trains the bias-corrected square, whose value on a
batch is about zero for independent data. The report always states the bias-corrected one. If the defense guards several
edges, the penalties are averaged. For a party without raw data of its own, such as a hop, the penalty is that between
its releases and the values it received; the paper has one cut, at the data. Token ids are compared for equality
(`splitfed.stats.token_points`), which the paper does not treat. No formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.annealing import Annealing, number_at, number_or_annealing, numbers_of
from splitfed.core.defense import PenaltyDefense, PenaltyGradient, TaskWeightDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import require_name
from splitfed.stats.dependence import Statistic, slope
from splitfed.stats.token_points import as_points

STATISTICS = ("biased", "unbiased")


@dataclass(frozen=True)
class DistanceCorrelation(PenaltyDefense, TaskWeightDefense):
    """Weighs the task by `1 - alpha` and the distance correlation of raw input and release by `alpha`, in [0, 1].

    `alpha`: a number, or a schedule over epochs, such as `Linear(0.0, 0.5, epochs=10)`.
    """

    alpha: float | Annealing = field(default=0.5, metadata=as_strength("weight against the task"))
    statistic: str = field(default="biased", metadata=require_name("statistic", STATISTICS))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for an alpha that leaves [0, 1] in any epoch, and for an unknown statistic."""
        super().__post_init__()
        object.__setattr__(
            self, "alpha", number_or_annealing("distance_correlation alpha", self.alpha, low=0.0, high=1.0)
        )

    @property
    def weighs_task(self) -> bool:
        """Whether alpha is above zero in any epoch."""
        return any(numbers_of(self.alpha))

    def task_weight(self, epoch: int) -> float:
        """Return the factor of the task's loss in `epoch`: 1 - alpha."""
        return 1.0 - number_at(self.alpha, epoch)

    @property
    def least_rows(self) -> int:
        """Smallest batch: four rows for the bias-corrected form."""
        return 4 if self.statistic == "unbiased" else 1

    def penalty(self, z: Tensor, context: Context) -> PenaltyGradient:
        """Return alpha times the distance correlation of the batch's raw inputs and all values released on the edge."""
        name: Statistic = "distance_correlation" if self.statistic == "biased" else "u_distance_correlation_sqr"
        return PenaltyGradient(slope(_private_inputs(context), z, name, number_at(self.alpha, context.epoch)))


def _private_inputs(context: Context) -> Tensor:
    """Return the party's raw inputs or, if it has none, the values it has received."""
    raw = [as_points(x) for x in context.inputs.values()] or [as_points(x.detach()) for x in context.arrived.values()]
    return raw[0] if len(raw) == 1 else torch.cat([value.reshape(len(value), -1) for value in raw], 1)
