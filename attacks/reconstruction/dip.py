"""Deep image prior: fits an untrained network until the release of its output equals the received one; needs no data.

Paper: after Ulyanov, Vedaldi, Lempitsky, "Deep image prior", CVPR 2018; as an attack at the cut it is a baseline of Li,
Yang, Liu, Wang, Hu, Yi, Xu, "GAN you see me? Enhanced data reconstruction attacks against split inference", NeurIPS
2023. Layout, rates and number of iterations are ours.

A network U of convolutions that halve the image and double it again, with skips, maps fixed noise n to an image x =
U(n); its weights, drawn afresh for each victim, minimise by Adam: mean((f(x) - z)²) + tv TV(x), f with the run's
defenses at their mean. Convolutions fit smooth shapes with clear edges first. The victims' networks are computed as one
network of grouped convolutions, independent of each other.

Where a defense is random the attack adapts: it measures the variance v of the noise by draws of its own, and stops a
victim at the first image whose release has a mean squared error of at most v (the discrepancy principle), as later ones
fit the noise. If no image reaches that, the one with the best fit is the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, Releases, Space, Span, unwrap
from splitfed.attacks.networks.gradient_descent import count_turns, part_of
from splitfed.attacks.reconstruction.inversion import REMEASURE, noise_variance, roughness, row_misfit, spread
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View

VICTIMS_AT_ONCE = 32
SKIPS = 4
"""Number of channels of a skip connection."""
LEAST_SIDE = 4
"""Smallest side after halving, in pixels."""


@dataclass(frozen=True)
class Dip(Attack):
    """Fits networks of `width` channels, with at most `levels` halvings, by `iterations` of Adam at rate `lr`.

    `tv`: weight of the total variation. Rows must be images (channels, height, width).
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.UPSTREAM})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"iterations": 200, "width": 8},
        "standard": {"iterations": 1000, "width": 16},
        "full": {"iterations": 3000, "width": 32},
    }
    space: ClassVar[Space] = {"lr": Span(1e-3, 3e-2, log=True), "tv": Span(1e-4, 1.0, log=True)}

    iterations: int = field(default=1000, metadata=require_count("dip iterations", low=1))
    lr: float = field(default=0.01, metadata=require_number("dip lr", low=0.0, open_low=True))
    width: int = field(default=16, metadata=require_count("dip width", low=1))
    levels: int = field(default=3, metadata=require_count("dip levels", low=1))
    tv: float = field(default=0.0, metadata=require_number("dip tv", low=0.0))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the images fitted to the releases in the view: (victims, *shape)."""
        if len(knowledge.shape) != 3 or knowledge.shape[1] * knowledge.shape[2] < 2:
            raise InvalidInput(
                f"dip reconstructs images (channels, height, width) of two pixels or more; rows of this run have shape "
                f"{knowledge.shape}"
            )
        seen = view.select(kind="activation").tensors(knowledge.device)
        victims = len(next(iter(seen.values())))
        total, found = -(-victims // VICTIMS_AT_ONCE) * self.iterations, list[Tensor]()
        for number, first in enumerate(range(0, victims, VICTIMS_AT_ONCE)):
            part = {name: z[first : first + VICTIMS_AT_ONCE] for name, z in seen.items()}
            told = part_of(progress, number * self.iterations, total)
            found.append(self._search(part, knowledge, generator, told))
        return torch.cat(found)

    def _search(self, seen: Releases, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        mean, sample = unwrap(knowledge.upstream), unwrap(knowledge.sample)
        net = SkipNetworks(len(next(iter(seen.values()))), knowledge.shape, self.width, self.levels)
        net = net.to(knowledge.device)
        noise = net.noise(generator).to(knowledge.device)
        optimizer = torch.optim.Adam(net.parameters(), lr=self.lr)
        kept, least, allowed = torch.zeros(()), torch.zeros(()), 0.0
        for step in count_turns(self.iterations + 1, progress, 10):
            x = spread(net(noise), knowledge.value_range)
            if step % REMEASURE == 0:
                allowed = noise_variance(mean, sample, x.detach())
            misfit = row_misfit(mean(x), seen)
            with torch.no_grad():
                if step == 0:
                    kept, least = x.clone(), misfit.clone()
                # A picture that is as near as the noise allows stays, whatever comes.
                better = (misfit < least) & ((least > allowed) | (allowed == 0.0))
                kept = torch.where(better.view(-1, 1, 1, 1), x, kept)
                least = torch.where(better, misfit, least)
            if step == self.iterations or (allowed > 0.0 and bool((least <= allowed).all())):
                break
            optimizer.zero_grad(set_to_none=True)
            (misfit + self.tv * roughness(x)).sum().backward()
            optimizer.step()
        return kept


class SkipNetworks(nn.Module):
    """Untrained convolutional networks with skip connections, one for each of `count` rows.

    They map noise to images of `shape`: (count, *shape), unbounded. Each level halves the sides by averaging and
    doubles them by repetition, as long as `LEAST_SIDE` pixels are left.
    """

    def __init__(self, count: int, shape: tuple[int, ...], width: int, levels: int) -> None:
        super().__init__()
        self._count, self._shape, self._width = count, shape, width
        possible = 0
        while possible < levels and min(shape[1:]) // 2 ** (possible + 1) >= LEAST_SIDE:
            possible += 1
        self.down = nn.ModuleList(self._block(width, width) for _ in range(possible))
        self.skips = nn.ModuleList(self._block(width, SKIPS, 1) for _ in range(possible))
        self.up = nn.ModuleList(self._block(width + SKIPS, width) for _ in range(possible))
        self.middle = self._block(width, width)
        self.last = nn.Conv2d(count * width, count * shape[0], 1, groups=count)

    def _block(self, inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
        conv = nn.Conv2d(self._count * inputs, self._count * outputs, kernel, padding=kernel // 2, groups=self._count)
        # Of one picture alone normalisation by the batch is that of every channel by itself.
        size = self._count * outputs
        return nn.Sequential(conv, nn.GroupNorm(size, size), nn.LeakyReLU(0.2))

    def noise(self, generator: torch.Generator) -> Tensor:
        """Return the input noise of the networks: (1, count * width, height, width), standard normal."""
        return torch.randn(1, self._count * self._width, *self._shape[1:], generator=generator)

    def forward(self, noise: Tensor) -> Tensor:
        """Return images (count, *shape)."""
        h, kept = noise, list[Tensor]()
        for down, skip in zip(self.down, self.skips, strict=True):
            kept.append(skip(h))
            h = down(functional.avg_pool2d(h, 2))
        h = self.middle(h)
        for up, beside in zip(reversed(self.up), reversed(kept), strict=True):
            h = functional.interpolate(h, size=beside.shape[2:], mode="nearest")
            h = up(self._join(h, beside))
        found: Tensor = self.last(h)
        return found.view(self._count, *self._shape)

    def _join(self, one: Tensor, other: Tensor) -> Tensor:
        """Return both tensors' channels concatenated network by network."""
        parts = [t.view(self._count, -1, *t.shape[2:]) for t in (one, other)]
        return torch.cat(parts, 1).flatten(0, 1).unsqueeze(0)
