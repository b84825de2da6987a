"""What scores are called and how they are written: metrics, targets of attacks, baselines, floors and oracles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from splitfed.attacks.scoring.label_metrics import EXCESS

UNBOUNDED = (-math.inf, math.inf)
SHARE = (0.0, 1.0)
AMOUNT = (0.0, math.inf)


@dataclass(frozen=True)
class Metric:
    """How a score is written, whether a larger value means that more leaked, and the `bounds` it cannot leave.

    `centre`: the value of chance, where one below it leaks as much as one above: the prediction is then the
    wrong way round, and whoever turns it over has what the other side of the centre has.
    """

    title: str
    unit: str
    up: bool
    digits: int
    bounds: tuple[float, float] = UNBOUNDED
    centre: float | None = None

    def leak(self, value: float) -> float:
        """Return how much a score of `value` leaks: a number that is greater for a greater leak."""
        if self.centre is not None:
            return self.centre + abs(value - self.centre)
        return value if self.up else -value


# The first of these that an attack was scored by is the one its headline uses.
METRICS = {
    "psnr": Metric("PSNR", " dB", True, 1),
    "ssim": Metric("SSIM", "", True, 3, (-1.0, 1.0)),
    "r2": Metric("R²", "", True, 3, (-math.inf, 1.0)),
    "mse": Metric("MSE", "", False, 4, AMOUNT),
    "token_accuracy": Metric("token accuracy", "", True, 3, SHARE),
    "auc": Metric("AUC", "", True, 3, SHARE, 0.5),
    "accuracy": Metric("accuracy", "", True, 3, SHARE),
    "assigned_accuracy": Metric("accuracy, classes named by the truth", "", True, 3, SHARE),
    "tpr_at_fpr_1%": Metric("TPR at FPR 1 %", "", True, 3, SHARE),
    "tpr_at_fpr_0.1%": Metric("TPR at FPR 0.1 %", "", True, 3, SHARE),
    "total_variation": Metric("total variation", "", False, 3, SHARE),
    "relative_error": Metric("relative error", "", False, 3, AMOUNT),
    "max_error": Metric("largest error", "", False, 5, AMOUNT),
    "error_bound": Metric("stated error", "", False, 5, AMOUNT),
    "determined": Metric("rows determined", "", True, 3, SHARE),
}


@dataclass(frozen=True)
class TargetDescription:
    """How an attack on a target is reported: what it `gets`, whom it is set beside (`baselines`, the first one counts).

    `metrics`: the most informative ones, before the others.
    """

    title: str
    gets: str
    baselines: Mapping[str, str]
    metrics: tuple[str, ...] = ()

    def order(self, metrics: Iterable[str]) -> list[str]:
        """Return `metrics`, the most informative first."""
        return sorted(metrics, key=lambda m: m not in self.metrics)


CLONES = ("clone", "trained", "fresh")
"""Whose upstream segments a stolen model is scored with."""
MEANS = {"mean_image": "mean", "random_pairing": "other"}
FLOORS = {"linear_inverse": "linear inverse", "nearest_1": "nearest row", "nearest_10": "mean of 10 nearest"}
"""What closed forms reconstruct from the same releases."""
LABEL_FLOORS = {"own_features": "own data alone"}
"""What the adversary's own data say of labels, and nothing that it received."""
ORACLES = {"oracle_pca_16": "oracle: 16 components", "oracle_nearest_row": "oracle: nearest row"}
"""What nobody reaches without the truth."""
# In the order in which a headline looks for an attack. A result that names no target is of an input's reconstruction.
TARGETS = {
    "inputs": TargetDescription("reconstruction", "reconstructs at", {**MEANS, **FLOORS, **ORACLES}),
    "tokens": TargetDescription(
        "reconstructed tokens", "reads tokens at", {"frequent_token": "most frequent", "random_pairing": "other"}
    ),
    "labels": TargetDescription(
        "predicted labels",
        "predicts labels at",
        {
            "majority": "majority",
            **LABEL_FLOORS,
            EXCESS: "beyond own data",
            "random_pairing": "other",
            "permutation_null": "shuffled",
        },
    ),
    "members": TargetDescription("predicted membership", "predicts membership at", {"chance": "chance"}),
    "shares": TargetDescription(
        "predicted class shares", "predicts the class shares of a client at", {"prior": "auxiliary rows' shares"}
    ),
    "representatives": TargetDescription(
        "class representatives", "shows what classes look like at", MEANS, ("accuracy",)
    ),
    "releases": TargetDescription(
        "decrypted activations", "reads activations at", {"mean_release": "mean", "random_pairing": "other"}
    ),
}
