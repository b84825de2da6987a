"""White-box inversion: search the input whose release, under the known upstream weights, equals what was seen.

Paper: He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (white box,
regularised maximum likelihood estimation).

Per victim: minimise mean((f(x) - z)^2) + tv TV(x) + l2 mean(x^2) with Adam (amsgrad, eps 1e-3), TV the mean squared
difference of neighbours in each direction. All victims run as one batch; their losses are added, so each is
optimised as if alone. f includes the run's defenses at their mean.

Where a defense is random the attack adapts: it measures the variance v of the release under noise of its own
drawing, and adds 2 v n_x / (n_z s) to tv, for n_x inputs, n_z released numbers and neighbours that differ by a
variance of s: with it the minimum is the most probable image under Gaussian noise. Without noise that adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs, Progress, Releases
from splitfed.errors import check_count, check_number
from splitfed.view import View

_REMEASURE = 50  # iterations: noise relative to the release changes with the image


@dataclass(frozen=True)
class Rmle(Attack):
    """`iterations` of Adam at rate `lr`; `tv` and `l2` weigh the two regularisers; `smoothness` is s above."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.UPSTREAM})
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {"iterations": 300, "lr": 0.05, "tv": 0.01, "l2": 0.0},
        "paper": {"iterations": 5000, "lr": 0.01, "tv": 1.0, "l2": 0.0},
    }

    iterations: int = 300
    lr: float = 0.05
    tv: float = 0.01
    l2: float = 0.0
    smoothness: float = 0.2

    def __post_init__(self) -> None:
        """Refuse a count below one, a rate that is not positive and negative weights."""
        check_count("rmle iterations", self.iterations, low=1)
        check_number("rmle lr", self.lr, low=0.0, open_low=True)
        check_number("rmle tv", self.tv, low=0.0)
        check_number("rmle l2", self.l2, low=0.0)
        check_number("rmle smoothness", self.smoothness, low=0.0, open_low=True)

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return (victims, *shape), started at the middle of the value range (or at zero)."""
        assert knowledge.upstream is not None
        seen = view.select(kind="activation").tensors(knowledge.device)
        victims = len(next(iter(seen.values())))
        start = sum(knowledge.value_range) / 2 if knowledge.value_range is not None else 0.0
        x = torch.full((victims, *knowledge.shape), start, device=knowledge.device, requires_grad=True)
        optimizer = torch.optim.Adam([x], lr=self.lr, eps=1e-3, amsgrad=True)
        tv = self.tv
        for iteration in range(self.iterations):
            if iteration % _REMEASURE == 0:
                tv = self.tv + 2 * _variance(knowledge, x) * x[0].numel() / (_width(seen) * self.smoothness)
            released = knowledge.upstream(x)
            loss = sum(((released[name] - z) ** 2).flatten(1).mean(1).sum() for name, z in seen.items())
            loss = loss + tv * total_variation(x) + self.l2 * x.square().flatten(1).mean(1).sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if iteration % 50 == 49:
                progress(iteration + 1, self.iterations)
        return x.detach()


def _width(releases: Releases) -> int:
    return sum(z[0].numel() for z in releases.values())


@torch.no_grad()
def _variance(knowledge: Knowledge, x: Tensor) -> float:
    """Return the mean variance that the defenses add to a released number; 0 where they draw nothing."""
    assert knowledge.upstream is not None
    assert knowledge.sample is not None
    mean, drawn = knowledge.upstream(x), knowledge.sample(x)
    return float(sum((drawn[n] - z).square().sum() for n, z in mean.items())) / (len(x) * _width(mean))


def total_variation(x: Tensor) -> Tensor:
    """Return the mean squared difference of neighbouring pixels, both directions, summed over rows; 0 for no image.

    x: (n, channels, height, width).
    """
    if x.dim() != 4:
        return x.new_zeros(())
    down = (x[:, :, 1:] - x[:, :, :-1]).square().flatten(1)
    across = (x[..., 1:] - x[..., :-1]).square().flatten(1)
    return sum((d.mean(1).sum() for d in (down, across) if d.shape[1]), x.new_zeros(()))
