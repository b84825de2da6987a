"""A small classifier of rows or releases: learns attributes for an attack, and scores reconstructions for the scorer.

Values with a height and a width go through two convolutions, token ids are embedded, others are flattened; several
values are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Progress
from splitfed.attacks.networks.gradient_descent import count_turns, draw_batches, take_step
from splitfed.attacks.networks.tokens import TokenReader
from splitfed.core.random import derive, generator, stream

Draw = Callable[[int], Mapping[str, Tensor]]

_WIDTH, _EPOCHS, _RATE, _BATCH = 32, 20, 3e-3, 32  # of the classifier that scores; .97 on 8x8 digits with 400 rows
_SIDE = 3  # a map is averaged to this height and width before it is read


class Classifier(nn.Module):
    """Maps values like those that are `known`, name -> (n, ...), to scores (n, classes).

    `width` channels, twice as many hidden units. Of token ids those in `known` are told apart.
    """

    def __init__(self, known: Mapping[str, Tensor], classes: int, width: int = 32) -> None:
        super().__init__()
        self._names = tuple(known)
        self.readers = nn.ModuleList(_reader(value, width) for value in known.values())
        size = sum(_read_size(value, width) for value in known.values())
        self.net = nn.Sequential(nn.Linear(size, 2 * width), nn.ReLU(), nn.Linear(2 * width, classes))

    def forward(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return (n, classes)."""
        read = [reader(values[name]) for name, reader in zip(self._names, self.readers, strict=True)]
        scores: Tensor = self.net(torch.cat(read, 1))
        return scores


def _reader(known: Tensor, width: int) -> nn.Module:
    shape = known.shape[1:]
    if not known.is_floating_point():
        return TokenReader(known, width)
    if len(shape) != 3:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(prod(shape), affine=False))
    return nn.Sequential(
        nn.BatchNorm2d(shape[0], affine=False),
        nn.Conv2d(shape[0], width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2 if min(shape[1:]) >= 16 else 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(_SIDE), nn.Flatten(),
    )  # fmt: skip


def _read_size(known: Tensor, width: int) -> int:
    """Return how many numbers a reader makes of a row."""
    if not known.is_floating_point():
        return width
    return width * _SIDE**2 if known.dim() == 4 else prod(known.shape[1:])


def fit(
    network: nn.Module,
    draw: Draw,
    labels: Tensor,
    generator: torch.Generator,
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    progress: Progress | None = None,
) -> None:
    """Train `network` on what `draw(epoch)` returns, values {name: (n, ...)}, for `labels` (n,) int64.

    Adam with cosine decay on the cross-entropy; the network is left in evaluation mode. A last batch of one row is
    left out: it has no variance to be normalised by.
    """
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    network.train()
    for epoch in count_turns(epochs, progress):
        values = draw(epoch)
        for rows in draw_batches(len(labels), batch_size, generator):
            loss = functional.cross_entropy(network({n: v[rows] for n, v in values.items()}), labels[rows])
            take_step(optimizer, loss)
        schedule.step()
    network.eval()


def train_classifier(
    like: Mapping[str, Tensor],
    passes: Sequence[Mapping[str, Tensor]],
    labels: Tensor,
    classes: int,
    generator: torch.Generator,
    *,
    width: int,
    **settings: Any,
) -> Classifier:
    """Return a classifier of values like those in `like`, {name: (n, ...)}, that learnt `labels` from `passes` in turn.

    `settings`: epochs, lr, batch_size and progress, as `fit` takes them.
    """
    network = Classifier({name: passes[0][name] for name in like}, classes, width)
    network.to(labels.device)
    fit(network, lambda epoch: passes[epoch % len(passes)], labels, generator, **settings)
    return network


_FITTED: WeakKeyDictionary[object, Callable[[Tensor], Tensor]] = WeakKeyDictionary()


def clean_classifier(owner: object, x: Tensor, y: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    """Return a function from rows (n, ...) to scores (n, classes), learnt from clean rows x with labels y (n,).

    Always the same for the same rows, two at least; kept for as long as `owner`, the data set that holds them, is.
    """
    if owner not in _FITTED:
        with stream(derive(0, "classifier")), torch.enable_grad():
            network = Classifier({"x": x}, classes, _WIDTH)
            drawn = generator(0, "classifier", "order")
            fit(network, lambda epoch: {"x": x}, y, drawn, epochs=_EPOCHS, lr=_RATE, batch_size=_BATCH)

        @torch.no_grad()
        def scores(rows: Tensor) -> Tensor:
            return torch.cat([network({"x": part}) for part in rows.to(x).split(256)])

        _FITTED[owner] = scores
    return _FITTED[owner]
