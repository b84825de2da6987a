"""Scores of predicted encrypted releases, by their distance from the decrypted values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.scoring.reconstruction_metrics import Scores, mean_image, mse, r2, random_pairing
from splitfed.core.errors import InvalidInput
from splitfed.stats.intervals import bootstrap_interval


class TrueReleases(NamedTuple):
    """Decrypted releases of the `victims`, (n, features), each number up to the error `precision`.

    `auxiliary`: releases of auxiliary rows. `error_bound`: (n,) largest absolute error of each victim as stated by the
    attack, infinity where unknown.
    """

    victims: Tensor
    auxiliary: Tensor
    precision: float
    error_bound: Tensor | None = None


def score_releases(true: TrueReleases, prediction: Tensor, generator: torch.Generator) -> Scores:
    """Score a `prediction` of releases, (n, features): predictor -> metric -> mean and interval over victims.

    Predictors: "attack", and the baselines "mean_release" (of auxiliary rows) and "random_pairing". Metrics:
    "relative_error", the Euclidean norm of the error over that of the release, "max_error", the largest absolute error
    of a number, "r2" and "mse". For the attack also "determined", the share of victims with a stated error, and
    "error_bound" of these: the stated error plus the precision of the truth.
    """
    truth = true.victims.double().flatten(1)
    if len(prediction) != len(truth) or prediction[0].numel() != truth.shape[1]:
        raise InvalidInput(f"releases were predicted in shape {tuple(prediction.shape)}; expected {tuple(truth.shape)}")
    predictions = {"attack": prediction.double().flatten(1)}
    if len(true.auxiliary):
        predictions["mean_release"] = mean_image(true.auxiliary.flatten(1)).expand(truth.shape)
    if len(truth) > 1:
        predictions["random_pairing"] = random_pairing(truth, generator)
    scores = {
        name: {metric: bootstrap_interval(value, generator) for metric, value in _score(truth, attempt).items()}
        for name, attempt in predictions.items()
    }
    if true.error_bound is not None:
        stated = torch.isfinite(true.error_bound)
        scores["attack"]["determined"] = bootstrap_interval(stated.double(), generator)
        if bool(stated.any()):
            bound = true.error_bound[stated].double() + true.precision
            scores["attack"]["error_bound"] = bootstrap_interval(bound, generator)
    return scores


def _score(truth: Tensor, prediction: Tensor) -> dict[str, Tensor]:
    error, size = (truth - prediction).abs(), truth.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    told = {"relative_error": error.norm(dim=1) / size, "max_error": error.max(1).values, "mse": mse(truth, prediction)}
    return told if bool((truth == truth[:1]).all()) else told | {"r2": r2(truth, prediction)}
