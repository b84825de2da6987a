"""Detects under-trained decoders: their error is measurably above that of a floor."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from splitfed.attacks.scoring.reconstruction_metrics import mse
from splitfed.stats.intervals import mean_interval

MARGIN = 0.2  # dB of the mean squared error: what a doubling of the training must gain to count
LEAST = 1e-6  # of the variance of the truth: below it a reconstruction is exact for every purpose


def floors_above(truth: Tensor, prediction: Tensor, floors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the `floors` that reconstruct `truth` (n, ...) measurably better than `prediction` does.

    `floors`: name -> (n, ...). A floor is better if the mean squared error of the prediction exceeds its own by more
    than .2 dB, and the 95 % interval of the difference, paired over victims, is above 0. Empty for a single victim.
    """
    if len(truth) < 2:
        return ()
    own = mse(truth, prediction)
    least = LEAST * float((truth.double() - truth.double().mean(0)).square().mean())
    above = []
    for name, rows in floors.items():
        floor = mse(truth, rows)
        worse = float(own.mean()) > 10 ** (MARGIN / 10) * max(float(floor.mean()), least)
        if worse and mean_interval((own - floor).tolist()).low > 0:
            above.append(name)
    return tuple(above)
