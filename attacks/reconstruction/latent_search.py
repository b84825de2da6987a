"""Latent search: optimizes latent numbers of a learnt prior until the release, under known weights, fits a given one.

Paper: after Li, Yang, Liu, Wang, Hu, Yi, Xu, "GAN you see me? Enhanced data reconstruction attacks against split
inference", NeurIPS 2023 (GLASS), with the decoder G of a variational autoencoder of the adversary's auxiliary rows
(`splitfed.attacks.networks.autoencoder`) in place of a StyleGAN trained on public pictures.

Stage 1 searches latent numbers u by Adam. It minimises

    |f(G(u)) - z|² / (m s) + kl KL(u)

for a release z of m numbers of variance s over the auxiliary rows; KL(u) is that of a Gaussian with the mean and
variance of the entries of u to a standard normal one. The search starts from the `restarts` samples with the least loss
among `draws` of the prior, and keeps the result with the least loss. Stage 2 optimizes the activations h behind the
first layer of G, the counterpart of w+, from the end of stage 1: the distance |h - h_0|², relative to the variance that
h has under the prior, has the weight `anchor` in place of KL.

Deviates: the authors draw the starts without regard to the release, add noise to w+, penalise total variation and the
square of the image, and leave w+ unconstrained. f has the run's defenses at their mean. Where they are random the
attack adapts: noise of variance v, which it measures by draws of its own, adds v / (m s) times |u|² (in stage 2: times
the relative |h - h_0|²), by which the minimum is the most probable u under Gaussian noise.

Rows outside the range of G cannot be reconstructed, and without the truth it is unknown which these are; for
comparison, the scorer's `oracle_pca_16` is a linear code of the default number of latent numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, Releases, Space, Span, unwrap
from splitfed.attacks.networks.autoencoder import VariationalAutoencoder
from splitfed.attacks.networks.gradient_descent import part_of
from splitfed.attacks.reconstruction.inversion import (
    VICTIMS_AT_ONCE,
    descend_rows,
    noise_variance,
    release_variance,
    row_misfit,
    width,
)
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows

LEAST_VARIANCE = 1e-12
"""Lower bound of the variances of releases, latent numbers and activations."""


@dataclass(frozen=True)
class LatentSearch(Attack):
    """Searches a prior of `latent` numbers and `width` hidden units, trained for `epochs` at rate `lr`.

    The prior is trained in batches of `batch_size`. Stage 1: `restarts` of `draws` samples, `latent_iterations` each at
    rate `latent_lr`, with the weight `kl`. Stage 2: `iterations` (0: none) at rate `free_lr`, with the weight `anchor`.
    Both rates fall along half a cosine.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.UPSTREAM, Needs.AUXILIARY})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"epochs": 60, "draws": 256, "restarts": 3, "latent_iterations": 60, "iterations": 60},
        "standard": {"epochs": 200, "draws": 1000, "restarts": 5, "latent_iterations": 150, "iterations": 300},
        "full": {"epochs": 400, "draws": 4000, "restarts": 200, "latent_iterations": 100, "iterations": 20000},
    }
    space: ClassVar[Space] = {
        "latent": (8, 16, 32, 64),
        "kl": Span(1e-3, 1.0, log=True),
        "anchor": Span(1e-3, 1.0, log=True),
    }

    latent: int = field(default=16, metadata=require_count("latent_search latent", low=1))
    width: int = field(default=256, metadata=require_count("latent_search width", low=1))
    epochs: int = field(default=200, metadata=require_count("latent_search epochs", low=1))
    batch_size: int = field(default=32, metadata=require_count("latent_search batch_size", low=1))
    lr: float = field(default=1e-3, metadata=require_number("latent_search lr", low=0.0, open_low=True))
    draws: int = field(default=1000, metadata=require_count("latent_search draws", low=1))
    restarts: int = field(default=5, metadata=require_count("latent_search restarts", low=1))
    latent_iterations: int = field(default=150, metadata=require_count("latent_search latent_iterations", low=1))
    latent_lr: float = field(default=0.1, metadata=require_number("latent_search latent_lr", low=0.0, open_low=True))
    iterations: int = field(default=300, metadata=require_count("latent_search iterations", low=0))
    free_lr: float = field(default=0.05, metadata=require_number("latent_search free_lr", low=0.0, open_low=True))
    kl: float = field(default=0.1, metadata=require_number("latent_search kl", low=0.0))
    anchor: float = field(default=0.1, metadata=require_number("latent_search anchor", low=0.0))

    def __post_init__(self) -> None:
        """Also raise `InvalidInput` for fewer draws than restarts."""
        super().__post_init__()
        if self.draws < self.restarts:
            raise InvalidInput(
                f"latent_search draws={self.draws!r} is not allowed; expected at least restarts={self.restarts!r}"
            )

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the reconstructions of the releases in the view: (victims, *shape)."""
        seen = view.select(kind="activation").tensors(knowledge.device)
        parts = [
            {name: z[first : first + VICTIMS_AT_ONCE] for name, z in seen.items()}
            for first in range(0, len(next(iter(seen.values()))), VICTIMS_AT_ONCE)
        ]
        each = self.latent_iterations + self.iterations
        total = self.epochs + len(parts) * each
        prior = self.train_prior(knowledge, generator, part_of(progress, 0, total))
        drawn = torch.randn(self.draws, self.latent, generator=generator).to(knowledge.device)
        found = []
        for number, part in enumerate(parts):
            before = self.epochs + number * each
            search = LatentSpace(prior, part, knowledge, self.kl, self.anchor)
            told = part_of(progress, before, total)
            u = search.best(drawn, self.restarts, self.latent_iterations, self.latent_lr, told)
            told = part_of(progress, before + self.latent_iterations, total)
            found.append(search.free(u, self.iterations, self.free_lr, told))
        return torch.cat(found)

    def train_prior(
        self, knowledge: Knowledge, generator: torch.Generator, progress: Progress | None = None
    ) -> VariationalAutoencoder:
        """Return the prior, trained on the auxiliary rows alone."""
        prior = VariationalAutoencoder(knowledge.shape, self.latent, self.width, knowledge.value_range).to(
            knowledge.device
        )
        prior.fit(
            unwrap(knowledge.auxiliary), generator, progress,
            epochs=self.epochs, batch_size=self.batch_size, lr=self.lr,
        )  # fmt: skip
        return prior.requires_grad_(False)


class LatentSpace:
    """Losses of rows of `prior` for the releases `seen`, value -> (victims, ...).

    Weights as in the head of this module.
    """

    def __init__(
        self, prior: VariationalAutoencoder, seen: Releases, knowledge: Knowledge, kl: float, anchor: float
    ) -> None:
        self._prior, self._seen, self._kl, self._anchor = prior, seen, kl, anchor
        self._function = unwrap(knowledge.upstream)
        x = unwrap(knowledge.auxiliary)
        self._scale = max(release_variance(self._function, x, seen), LEAST_VARIANCE)
        noise = noise_variance(self._function, unwrap(knowledge.sample), x[:VICTIMS_AT_ONCE])
        self._noise = noise / (self._scale * width(seen))

    def losses(self, u: Tensor) -> Tensor:
        """Return the stage 1 losses of latent numbers u (victims, restarts, latent): (victims, restarts)."""
        count = u.shape[1]
        flat = u.flatten(0, 1)
        seen = {name: z.repeat_interleave(count, 0) for name, z in self._seen.items()}
        fit = row_misfit(self._function(self._prior.decode(flat)), seen) / self._scale
        losses: Tensor = (fit + self._distance_from_prior(flat)).view(-1, count)
        return losses

    def best(self, drawn: Tensor, restarts: int, steps: int, lr: float, progress: Progress | None = None) -> Tensor:
        """Return the latent numbers (victims, latent) with the least loss after `restarts` searches.

        `drawn`: samples of the prior, from which the searches start.
        """
        with torch.no_grad():
            released = self._function(self._prior.decode(drawn))
            squares = [torch.cdist(flat_rows(z), flat_rows(released[n])).square() for n, z in self._seen.items()]
            losses = torch.stack(squares).sum(0) / (width(self._seen) * self._scale) + self._distance_from_prior(drawn)
        nearest = losses.topk(restarts, 1, largest=False).indices
        u = descend_rows(drawn[nearest], self.losses, steps, lr, progress)
        with torch.no_grad():
            return u[torch.arange(len(u), device=u.device), self.losses(u).argmin(1)]

    def free(self, u: Tensor, steps: int, lr: float, progress: Progress | None = None) -> Tensor:
        """Return the rows (victims, *shape) of stage 2, which starts from the first layer's activations for u."""
        first: Tensor = self._prior.first(u)
        variance = self._prior.hidden_variance().clamp_min(LEAST_VARIANCE)

        def losses(hidden: Tensor) -> Tensor:
            away = (hidden - first).square() / variance
            fit: Tensor = row_misfit(self._function(self._prior.show(hidden)), self._seen) / self._scale
            return fit + self._anchor * away.mean(1) + self._noise * away.sum(1)

        with torch.no_grad():
            found: Tensor = self._prior.show(descend_rows(first, losses, steps, lr, progress))
        return found

    def _distance_from_prior(self, u: Tensor) -> Tensor:
        """Return the prior term of latent numbers u (n, latent), kl KL(u) plus the noise term: (n,)."""
        return self._kl * divergence(u) + self._noise * u.square().sum(1)


def divergence(u: Tensor) -> Tensor:
    """Return KL of the Gaussian with mean and (biased) variance of each row of u (n, latent) to N(0, 1): (n,), >= 0.

    Of a single number, which has no variance, half its square.
    """
    if u.shape[1] == 1:
        return u[:, 0].square() / 2
    mean, variance = u.mean(1), u.var(1, correction=0).clamp_min(LEAST_VARIANCE)
    return (mean.square() + variance - 1 - variance.log()) / 2
