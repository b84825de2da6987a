"""Ratio of gradients at a hijacked cut: that of a client's distance correlation over that of the hijacking server.

Source: Pasquini, Ateniese, Bernaschi, "Unleashing the tiger: inference attacks on split learning", CCS 2021, who weigh
distance correlation by 1e4 against a server's gradient times 50, at a cut of 256 channels.

With z (batch, ...) what the client releases for rows x, a1 the weight of its distance correlation and a2 what the
server multiplies its gradient by,

rho = a1 |grad_z DCOR(x, z)| / (a2 |grad_z mean C(z)|),

lengths over the whole batch. An optimizer that is invariant to the length of a gradient, such as Adam, depends on rho
alone. The weights alone are not comparable: distance correlation does not change when z is scaled, so its gradient is
orthogonal to z and as long as 1 / D, D being the mean distance of two rows of z; the critic's is controlled by its
penalty, for every channel separately if `per_channel`. Both change with the width of the cut, and so does DCOR. So a
defended run at another width is comparable with the authors' only if a1 is scaled to keep rho (`kept_ratio`), and its
scores should be reported with rho.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, check_number
from splitfed.stats.dependence import Statistic, slope


class GradientRatio(NamedTuple):
    """Means over batches: `defense` a1 |grad DCOR|, `attack` a2 |grad C|, mean `distance` of two rows of z.

    All above 0.
    """

    defense: float
    attack: float
    distance: float

    @property
    def rho(self) -> float:
        """Return the mean length of the defense's gradient over that of the attack's."""
        return self.defense / self.attack


def gradient_ratio(
    batches: Iterable[tuple[Tensor, Tensor]],
    critic: nn.Module,
    weight: float = 1.0,
    strength: float = 1.0,
    statistic: Statistic = "distance_correlation",
) -> GradientRatio:
    """Return the lengths of both gradients, averaged over `batches` of raw rows x (n, ...) and releases z (n, ...).

    `critic`: maps (n, ...) to (n,); frozen, in its current mode. `weight` and `strength`: a1 and a2, above 0. Raises
    `InvalidInput` for no batch, batches of one row, and if either gradient is zero or not finite.
    """
    check_number("gradient_ratio weight", weight, low=0.0, open_low=True)
    check_number("gradient_ratio strength", strength, low=0.0, open_low=True)
    batch_lengths = [_lengths(x, z, critic, statistic) for x, z in batches]
    if not batch_lengths:
        raise InvalidInput("gradient_ratio batches=() is not allowed; expected one batch or more")
    defense, attack, distance = (sum(each) / len(batch_lengths) for each in zip(*batch_lengths, strict=True))
    for name, length in (("distance correlation", defense), ("the critic", attack)):
        if not 0.0 < length < float("inf"):
            raise InvalidInput(f"the gradient of {name} has length {length:g}; expected a finite one above zero")
    return GradientRatio(weight * defense, strength * attack, distance)


def kept_ratio(weight: float, reference: GradientRatio, here: GradientRatio) -> float:
    """Return `weight`, the factor of the distance correlation in `reference`, scaled so that rho is the same in `here`.

    Both ratios are measured with `weight`, each with the strength of its run.
    """
    check_number("kept_ratio weight", weight, low=0.0, open_low=True)
    return weight * reference.rho / here.rho


def _lengths(x: Tensor, z: Tensor, critic: nn.Module, statistic: Statistic) -> tuple[float, float, float]:
    if len(x) != len(z) or len(z) < 2:
        raise InvalidInput(f"a batch has {len(x)} raw rows and {len(z)} releases; expected as many, two or more")
    if not x.is_floating_point():
        raise InvalidInput("gradient_ratio compares rows of real numbers; these are whole ones, such as token ids")
    leaf = z.detach().clone().requires_grad_()
    with torch.enable_grad():
        (sent,) = torch.autograd.grad(critic(leaf).mean(), leaf)
    pull = slope(x.detach(), z.detach(), statistic)
    return float(pull.norm()), float(sent.norm()), float(torch.pdist(z.detach().flatten(1)).mean())
