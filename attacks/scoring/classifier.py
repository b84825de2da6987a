"""A small classifier of rows or releases, for attacks on attributes and for scoring reconstructions.

Values with height and width pass two convolutions, token ids are embedded, others are flattened; several values are
concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.networks.gradient_descent import descend
from splitfed.attacks.networks.tokens import TokenReader
from splitfed.core.random import derive, generator, stream

_WIDTH, _EPOCHS, _RATE, _BATCH = 32, 20, 3e-3, 32  # of the classifier that scores; .97 on 8x8 digits with 400 rows
_SIDE = 3  # a map is averaged to this height and width before it is read


class Classifier(nn.Module):
    """Maps values of the shapes in `known`, name -> (n, ...), to scores (n, classes).

    `width`: number of channels; twice as many hidden units. The vocabulary of token ids is that of `known`.
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
        flat = nn.Flatten() if shape else nn.Unflatten(0, (-1, 1))
        return nn.Sequential(flat, nn.BatchNorm1d(prod(shape), affine=False))
    return nn.Sequential(
        nn.BatchNorm2d(shape[0], affine=False),
        nn.Conv2d(shape[0], width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2 if min(shape[1:]) >= 16 else 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(_SIDE), nn.Flatten(),
    )  # fmt: skip


def _read_size(known: Tensor, width: int) -> int:
    """Return the number of features that a reader computes of a row."""
    if not known.is_floating_point():
        return width
    return width * _SIDE**2 if known.dim() == 4 else prod(known.shape[1:])


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
    """Return a classifier of values like those in `like`, {name: (n, ...)}, trained on `labels` with `passes` in turn.

    `labels` (n,) int64. `settings`: epochs, lr, batch_size and progress, as in `descend`; the loss is the
    cross-entropy. The classifier is on the device of the labels, in evaluation mode.
    """
    network = Classifier({name: passes[0][name] for name in like}, classes, width).to(labels.device)

    def loss(values: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return functional.cross_entropy(network({name: z[rows] for name, z in values.items()}), labels[rows])

    descend(network.parameters(), passes, loss, len(labels), generator, **settings)
    return network.eval()


_FITTED: WeakKeyDictionary[object, Callable[[Tensor], Tensor]] = WeakKeyDictionary()


def clean_classifier(owner: object, x: Tensor, y: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    """Return a function from rows (n, ...) to scores (n, classes), trained on clean rows x with labels y (n,).

    Deterministic for the same rows, at least two; cached for the lifetime of `owner`, the data set that holds them.
    """
    if owner not in _FITTED:
        with stream(derive(0, "classifier")), torch.enable_grad():
            rows = {"x": x}
            network = train_classifier(
                rows, [rows], y, classes, generator(0, "classifier", "order"),
                width=_WIDTH, epochs=_EPOCHS, lr=_RATE, batch_size=_BATCH,
            )  # fmt: skip

        @torch.no_grad()
        def scores(rows: Tensor) -> Tensor:
            return torch.cat([network({"x": part}) for part in rows.to(x).split(256)])

        _FITTED[owner] = scores
    return _FITTED[owner]
