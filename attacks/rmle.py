"""White-box inversion: search the input whose release, under the known upstream weights, equals what was seen.

Paper: He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (white box,
regularised maximum likelihood estimation).

Per victim: minimise mean((f(x) - z)^2) + tv TV(x) + l2 mean(x^2) with Adam (amsgrad, eps 1e-3), TV the mean squared
difference of neighbours in each direction. All victims run as one batch; their losses are added, so each is
optimised as if alone. f includes the run's defenses at their mean, which for additive noise is the likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.errors import check_count, check_number
from splitfed.view import View


@dataclass(frozen=True)
class Rmle(Attack):
    """`iterations` of Adam at rate `lr`; `tv` and `l2` weigh the two regularisers."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.UPSTREAM})
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {"iterations": 300, "lr": 0.05, "tv": 0.01, "l2": 0.0},
        "paper": {"iterations": 5000, "lr": 0.01, "tv": 1.0, "l2": 0.0},
    }

    iterations: int = 300
    lr: float = 0.05
    tv: float = 0.01
    l2: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a count below one, a rate that is not positive and negative weights."""
        check_count("rmle iterations", self.iterations, low=1)
        check_number("rmle lr", self.lr, low=0.0, open_low=True)
        check_number("rmle tv", self.tv, low=0.0)
        check_number("rmle l2", self.l2, low=0.0)

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return (victims, *shape), started at the middle of the value range (or at zero)."""
        assert knowledge.upstream is not None
        seen = view.select(kind="activation").tensors(knowledge.device)
        victims = len(next(iter(seen.values())))
        start = sum(knowledge.value_range) / 2 if knowledge.value_range is not None else 0.0
        x = torch.full((victims, *knowledge.shape), start, device=knowledge.device, requires_grad=True)
        optimizer = torch.optim.Adam([x], lr=self.lr, eps=1e-3, amsgrad=True)
        for iteration in range(self.iterations):
            released = knowledge.upstream(x)
            loss = sum(((released[name] - z) ** 2).flatten(1).mean(1).sum() for name, z in seen.items())
            loss = loss + self.tv * total_variation(x) + self.l2 * x.square().flatten(1).mean(1).sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if iteration % 50 == 49:
                progress(iteration + 1, self.iterations)
        return x.detach()


def total_variation(x: Tensor) -> Tensor:
    """Return the mean squared difference of neighbouring pixels, both directions, summed over rows; 0 for no image.

    x: (n, channels, height, width).
    """
    if x.dim() != 4:
        return x.new_zeros(())
    down = (x[:, :, 1:] - x[:, :, :-1]).square().flatten(1)
    across = (x[..., 1:] - x[..., :-1]).square().flatten(1)
    return sum((d.mean(1).sum() for d in (down, across) if d.shape[1]), x.new_zeros(()))
