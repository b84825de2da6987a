"""Inverse network: a decoder trained on queries with auxiliary data, then applied to what was released.

Paper: He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (black box).

The decoder is trained on releases that went through the run's own defenses, drawn afresh every epoch where they are
random, so the attack adapts to them. Loss, batches, rate and number of epochs of the budget "full" are the
authors'. In vertical runs the same is known as training-based back mapping (VFLAIR, after ResSFL). The decoder's
layout is ours (`splitfed.attacks.reconstruction.decoder`), and so is the way the rate falls: along half a cosine, where
theirs halves every ten epochs, under the amsgrad variant of Adam.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, Releases, Space, Span, unwrap
from splitfed.attacks.networks.gradient_descent import descend
from splitfed.attacks.networks.image_parts import boxes
from splitfed.attacks.networks.query_passes import query_passes, query_shuffled
from splitfed.attacks.reconstruction.decoder import Decoder
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View

SMOOTHED = 0.5
"""How far synthetic rows lie from the row that each is drawn about, in the standard deviations of all."""


@dataclass(frozen=True)
class InverseNetwork(Attack):
    """`epochs` over the auxiliary rows in batches of `batch_size` with Adam at rate `lr`; decoder of `width`.

    `queries`: how often the auxiliary rows are sent through the victims' parties to begin with; where a defense is
    random or goes by the batch, they are sent once more every epoch. `synthetic`: rows drawn anew about each auxiliary
    row every epoch, of which it learns too (`draw_synthetic`).
    """

    trains_decoder: ClassVar[bool] = True
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"epochs": 5, "batch_size": 32, "lr": 3e-3, "width": 16},
        "standard": {"epochs": 20, "batch_size": 32, "lr": 3e-3, "width": 16},
        "full": {"epochs": 50, "batch_size": 32, "lr": 1e-3, "width": 32},
    }

    space: ClassVar[Space] = {"lr": Span(3e-4, 1e-2, log=True), "width": (16, 32, 64)}

    epochs: int = field(default=20, metadata=require_count("inverse_network epochs", low=1))
    batch_size: int = field(default=32, metadata=require_count("inverse_network batch_size", low=1))
    lr: float = field(default=3e-3, metadata=require_number("inverse_network lr", low=0.0, open_low=True))
    width: int = field(default=16, metadata=require_count("inverse_network width", low=1))
    queries: int = field(default=5, metadata=require_count("inverse_network queries", low=1))
    synthetic: int = field(default=0, metadata=require_count("inverse_network synthetic", low=0))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the decoder's rows for the releases in the view: (victims, *shape)."""
        released = view.select(kind="activation").tensors(knowledge.device)
        x, query = unwrap(knowledge.auxiliary), unwrap(knowledge.query)
        shuffled = partial(query_shuffled, query, generator=generator)
        passes = query_passes(shuffled, x, self.queries)
        decoder = self._decoder(released, knowledge).to(knowledge.device)
        decoder.fit(passes, x)
        # Adam has a smallest gradient that it takes in earnest, and what is left may be tiny.
        unit = float(decoder.unit) ** 2

        def ask(epoch: int) -> tuple[Releases, Tensor]:
            if len(passes) == 1 and not self.synthetic:
                return passes[0], x
            rows = torch.cat([x, draw_synthetic(x, self.synthetic, generator)])
            rows = rows if knowledge.value_range is None else rows.clamp(*knowledge.value_range)
            return shuffled(rows), rows

        def loss(asked: tuple[Releases, Tensor], chosen: Tensor) -> Tensor:
            z, rows = asked
            return functional.mse_loss(decoder({name: t[chosen] for name, t in z.items()}), rows[chosen]) / unit

        descend(
            decoder.parameters(), ask, loss, len(x) * (1 + self.synthetic), generator, progress,
            epochs=self.epochs, lr=self.lr, batch_size=self.batch_size,
        )  # fmt: skip
        with torch.no_grad():
            prediction: Tensor = decoder.eval()(released)
        return prediction

    def _decoder(self, released: Releases, knowledge: Knowledge) -> Decoder:
        """Return an untrained decoder: from releases like those in `released` to rows (n, *shape)."""
        shapes = {name: tuple(z.shape[1:]) for name, z in released.items()}
        image, mean = knowledge.shape, unwrap(knowledge.auxiliary).mean(0).cpu()
        parts = boxes(image, knowledge.places, knowledge.origins, shapes) if len(image) == 3 else None
        return Decoder(shapes, image, knowledge.value_range, self.width, mean, parts)


def draw_synthetic(x: Tensor, times: int, generator: torch.Generator) -> Tensor:
    """Return (times * n, *shape): Gaussian draws about every row of x (n, *shape), mean and covariance of all as in x.

    The smoothed bootstrap of Silverman, Young, "The bootstrap: to smooth or not to smooth?", Biometrika 74, 1987.
    """
    flat = x.flatten(1).double()
    centred = flat - flat.mean(0)
    noise = torch.randn(times * len(x), len(x), generator=generator, dtype=flat.dtype).to(x.device)
    spread = noise @ centred / len(x) ** 0.5
    drawn: Tensor = flat.mean(0) + (1 - SMOOTHED**2) ** 0.5 * centred.repeat(times, 1) + SMOOTHED * spread
    return drawn.to(x.dtype).view(-1, *x.shape[1:])
