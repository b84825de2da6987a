"""Mutual information between rows and their noisy releases: a lower and an upper estimate with standard errors.

Paper: Poole, Ozair, van den Oord, Alemi, Tucker, "On variational bounds of mutual information", ICML 2019 (with the
density of a release given the row known: InfoNCE with its best critic below, leave-one-out above).

The noise is known, so the density p(z | x) of a release given its row is. With z drawn for row x_i and K other rows,

    lower:  E log p(z|x_i) - log (p(z|x_i) + sum_j p(z|x_j)) / (K + 1)
    upper:  E log p(z|x_i) - log sum_j p(z|x_j) / K

in nats. The true value lies between, up to the standard errors over rows. The lower estimate cannot exceed log(K + 1):
close to that, a release identifies its row among all others, and the upper estimate is not informative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_names

KINDS = ("gaussian", "laplace")
_CHUNK = 1 << 22  # numbers held in float64 at a time


@dataclass(frozen=True)
class MutualInformation:
    """Estimates in nats, each with its standard error over rows; `most` is log(K + 1), the maximum of `lower`.

    Negative values of `lower` are estimation errors, as information is at least 0.
    """

    lower: float
    lower_error: float
    upper: float
    upper_error: float
    most: float

    @property
    def saturated(self) -> bool:
        """Whether nearly every release identifies its row among all others, so that only a lower bound is known."""
        return self.lower > 0.95 * self.most


def mutual_information(clean: Tensor, others: Tensor, kind: str, generator: torch.Generator) -> MutualInformation:
    """Estimate the mutual information of row and release, for noise of unit size added to `clean` (n, m), n >= 2.

    `others`: (K, m) clean releases of K other rows of the same distribution. `kind` of the noise: "gaussian" (deviation
    1) or "laplace" (scale 1). Divide releases by the size of their noise first.
    """
    check_names("kind of noise", KINDS, kind)
    if len(clean) < 2 or len(others) < 1 or clean.shape[1:] != others.shape[1:]:
        raise InvalidInput(
            f"clean has shape {tuple(clean.shape)} and others {tuple(others.shape)}; expected (n, m) with n >= 2 and "
            "(K, m) with K >= 1"
        )
    own, rest = clean.double().flatten(1), others.double().flatten(1)
    z = own + _noise(kind, own, generator)
    given = _misfit(kind, z, own)
    step = max(1, _CHUNK // (len(rest) * rest.shape[1]))
    blind = torch.cat([torch.logsumexp(_misfit(kind, part[:, None], rest[None]), 1) for part in z.split(step)])
    count = len(rest)
    lower = given - torch.logaddexp(given, blind) + math.log(count + 1)
    upper = given - blind + math.log(count)
    errors = [float(value.std()) / math.sqrt(len(z)) for value in (lower, upper)]
    return MutualInformation(float(lower.mean()), errors[0], float(upper.mean()), errors[1], math.log(count + 1))


def _misfit(kind: str, z: Tensor, mean: Tensor) -> Tensor:
    """Return the logarithm of the density of z around `mean`, up to a constant, over the last dimension."""
    return -(z - mean).square().sum(-1) / 2 if kind == "gaussian" else -(z - mean).abs().sum(-1)


def _noise(kind: str, like: Tensor, generator: torch.Generator) -> Tensor:
    if kind == "gaussian":
        return torch.randn(like.shape, generator=generator, device=generator.device, dtype=like.dtype).to(like)
    first, second = (
        torch.empty(like.shape, device=generator.device, dtype=like.dtype).exponential_(generator=generator)
        for _ in range(2)
    )
    return (first - second).to(like)
