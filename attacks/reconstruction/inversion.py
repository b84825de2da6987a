"""Shared by white-box inversions: gradient search for inputs with a given release, and the total variation of images.

If a defense is random the search adapts: it measures the variance v of the release under noise of its own draws, and
adds 2 v n_x / (n_z s) to the weight of the total variation, for n_x inputs, n_z released numbers and neighbours that
differ by a variance of s. The minimum is then the most probable image under Gaussian noise. Without noise that term is
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge, Progress, Releases
from splitfed.attacks.networks.gradient_descent import count_turns
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows

VICTIMS_AT_ONCE = 64
REMEASURE = 50  # iterations: noise relative to the release changes with the image

Function = Callable[[Tensor], Releases]


@dataclass(frozen=True)
class Search:
    """Search for rows whose release under `mean` equals `seen`; `sample` is `mean` with freshly drawn noise.

    `tv` and `l2`: weights of the total variation and of the mean square of a row; `smoothness`: s in the head of this
    module.
    """

    seen: Releases
    mean: Function
    sample: Function
    tv: float
    l2: float
    smoothness: float = 0.2

    def advance(
        self, x: Tensor, optimizer: torch.optim.Optimizer, steps: int, progress: Progress | None = None
    ) -> None:
        """Take `steps` of `optimizer` over x (n, *shape).

        The losses of rows are added, so each is optimised independently.
        """
        tv = self.tv
        for step in count_turns(steps, progress, 50):
            if step % REMEASURE == 0:
                variance = noise_variance(self.mean, self.sample, x)
                tv = self.tv + 2 * variance * x[0].numel() / (width(self.seen) * self.smoothness)
            loss = misfit(self.mean(x), self.seen)
            loss = loss + tv * total_variation(x) + self.l2 * x.square().flatten(1).mean(1).sum()
            (x.grad,) = torch.autograd.grad(loss, x)
            optimizer.step()


def start(seen: Releases, knowledge: Knowledge) -> Tensor:
    """Return a start for each victim, (victims, *shape), at the middle of the value range (or at zero)."""
    middle = sum(knowledge.value_range) / 2 if knowledge.value_range is not None else 0.0
    victims = len(next(iter(seen.values())))
    return torch.full((victims, *knowledge.shape), middle, device=knowledge.device, requires_grad=True)


def invert(view: View, knowledge: Knowledge, lr: float, steps: int, progress: Progress | None, **how: Any) -> Tensor:
    """Return rows (victims, *shape) whose release approximates that in `view`, after `steps` of Adam from `start`.

    `how`: the other fields of `Search`.
    """
    seen = view.select(kind="activation").tensors(knowledge.device)
    x = start(seen, knowledge)
    Search(seen, **how).advance(x, torch.optim.Adam([x], lr=lr, eps=1e-3, amsgrad=True), steps, progress)
    return x.detach()


@torch.no_grad()
def noise_variance(mean: Function, sample: Function, x: Tensor) -> float:
    """Return the mean variance that the defenses add to a released number of rows x; 0 if they are not random.

    `mean`, `sample`: releases with the defenses at their mean, and with freshly drawn noise.
    """
    expected, drawn = mean(x), sample(x)
    return float(sum((drawn[n] - z).square().sum() for n, z in expected.items())) / (len(x) * width(expected))


@torch.no_grad()
def release_variance(function: Function, x: Tensor, names: Iterable[str]) -> float:
    """Return the mean variance, over the rows x (n, *shape), of a released number of the values `names`."""
    released = [function(rows) for rows in x.split(VICTIMS_AT_ONCE)]
    known = [torch.cat([part[name] for part in released]) for name in names]
    return sum(float((z - z.mean(0)).square().sum()) for z in known) / sum(z.numel() for z in known)


def row_misfit(released: Releases, seen: Releases) -> Tensor:
    """Return the mean squared difference of released numbers, over all values, for each row: (rows,)."""
    squares = [flat_rows((released[name] - z).square()).sum(1) for name, z in seen.items()]
    return torch.stack(squares).sum(0) / width(seen)


def misfit(released: Releases, seen: Releases) -> Tensor:
    """Return the mean squared difference of each row's release, summed over values and rows: a scalar."""
    losses = [flat_rows((released[name] - z) ** 2).mean(1).sum() for name, z in seen.items()]
    return torch.stack(losses).sum()


def width(releases: Releases) -> int:
    """Return the number of released numbers of one row."""
    return sum(z[0].numel() for z in releases.values())


def descend_rows(
    start: Tensor, losses: Callable[[Tensor], Tensor], steps: int, lr: float, progress: Progress | None = None
) -> Tensor:
    """Return the result of `steps` of Adam from `start`, at a rate from `lr` along half a cosine.

    The losses of rows are added, so each row is optimised independently.
    """
    x = start.detach().clone()
    if steps == 0:
        return x
    with torch.enable_grad():
        x.requires_grad_()
        optimizer = torch.optim.Adam([x], lr=lr)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in count_turns(steps, progress, 10):
            (x.grad,) = torch.autograd.grad(losses(x).sum(), x)
            optimizer.step()
            rate.step()
    return x.detach()


def total_variation(x: Tensor) -> Tensor:
    """Return the mean squared difference of neighbouring pixels, both directions, summed over rows.

    x: (n, channels, height, width); for rows that are no images the result is 0.
    """
    return roughness(x).sum()


def roughness(x: Tensor) -> Tensor:
    """Return the total variation of every row of x (n, ...): (n,); 0 for rows that are no images."""
    if x.dim() != 4:
        return x.new_zeros(len(x))
    down = (x[:, :, 1:] - x[:, :, :-1]).square().flatten(1)
    across = (x[..., 1:] - x[..., :-1]).square().flatten(1)
    return sum((d.mean(1) for d in (down, across) if d.shape[1]), x.new_zeros(len(x)))


def spread(x: Tensor, value_range: tuple[float, float] | None) -> Tensor:
    """Return unbounded numbers mapped into `value_range` by a sigmoid; unchanged without a range."""
    if value_range is None:
        return x
    low, high = value_range
    return low + (high - low) * torch.sigmoid(x)
