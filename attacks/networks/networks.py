"""Residual networks that attackers train: an encoder to a cut, a decoder back from it, and critics of either.

All are built from shapes alone: images (channels, height, width) or vectors (features,). They have no normalisation, so
they compute the same in training and evaluation mode and have no state but their weights. They train best on data in
[-1, 1], to which `Scale` maps a value range.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.networks.image_parts import bridge

Shape = tuple[int, ...]

_WORD = 50  # size of the embedding that a label becomes


class Residual(nn.Module):
    """Residual block: two convolutions (or two linear layers) plus the identity."""

    def __init__(self, width: int, flat: bool = False) -> None:
        super().__init__()
        self.one = nn.Linear(width, width) if flat else nn.Conv2d(width, width, 3, padding=1)
        self.two = nn.Linear(width, width) if flat else nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        found: Tensor = x + self.two(functional.relu(self.one(functional.relu(x))))
        return found


class Translator(nn.Module):
    """Maps (n, *source) to (n, *target) through `blocks` residual blocks of `width`, with a label input if `classes`.

    Between images the size is halved before the blocks, or doubled behind them, step by step, and a convolution bridges
    the remaining difference; vectors are connected through a small image of at most 4x4. `bounded`: whether the result
    lies in (-1, 1).
    """

    def __init__(
        self,
        source: Shape,
        target: Shape,
        width: int,
        blocks: int = 2,
        classes: int | None = None,
        bounded: bool = False,
    ) -> None:
        super().__init__()
        self._bounded = bounded
        self.label = LabelChannel(source, classes) if classes is not None else None
        shape = source if self.label is None else self.label.shape
        flat = len(source) == len(target) == 1 or {len(source), len(target)} - {1, 3}
        self.net = (_vectors if flat else _images)(shape, target, width, blocks)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return (n, *target); `y`: (n,) labels, if the network has classes."""
        if self.label is not None:
            x = self.label(x, y)
        found: Tensor = self.net(x)
        return torch.tanh(found) if self._bounded else found


class Critic(nn.Module):
    """Maps every row of (n, *shape) to one number, greater for rows of the real kind.

    With a label input if `classes`.
    """  # fmt: skip

    def __init__(self, shape: Shape, width: int, blocks: int = 2, classes: int | None = None) -> None:
        super().__init__()
        self.net = Translator(shape, (1,), width, blocks, classes)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return (n,)."""
        found: Tensor = self.net(x, y)
        return found.squeeze(1)


class LabelChannel(nn.Module):
    """Appends an embedding of the label to a tensor: one more channel of an image, or more features."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self._flat = len(shape) != 3
        self.shape: Shape = (prod(shape) + _WORD,) if self._flat else (shape[0] + 1, *shape[1:])
        self.embedding = nn.Embedding(classes, _WORD)
        self.spread = nn.Identity() if self._flat else nn.Linear(_WORD, shape[1] * shape[2])

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return (n, *self.shape) for x (n, *shape) and y (n,)."""
        assert y is not None
        word = self.spread(self.embedding(y))
        if self._flat:
            return torch.cat([x.flatten(1), word], 1)
        return torch.cat([x, word.view(len(x), 1, *x.shape[2:])], 1)


def _vectors(source: Shape, target: Shape, width: int, blocks: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(prod(source), width)]
    layers += [Residual(width, flat=True) for _ in range(blocks)]
    layers += [nn.ReLU(), nn.Linear(width, prod(target)), nn.Unflatten(1, target)]
    return nn.Sequential(*layers)


def _images(source: Shape, target: Shape, width: int, blocks: int) -> nn.Sequential:
    """Return a network from image to image, image to vector or vector to image."""
    layers: list[nn.Module] = []
    if len(source) == 3:
        side = list(source[1:])
        goal = list(target[1:]) if len(target) == 3 else [_small(size) for size in side]
        channels = source[0]
        while side[0] >= 2 * goal[0] and side[1] >= 2 * goal[1]:
            layers += [nn.Conv2d(channels, width, 4, stride=2, padding=1), nn.ReLU()]
            channels, side = width, [size // 2 for size in side]
        layers.append(nn.Conv2d(channels, width, 3, padding=1))
    else:
        goal = list(target[1:])
        side = [_small(size) for size in goal]
        layers += [nn.Linear(source[0], width * prod(side)), nn.Unflatten(1, (width, *side))]
    # At the smaller of both sizes, where a block costs least; where the image is large, it has half the channels.
    layers += [Residual(width) for _ in range(blocks)]
    while 2 * side[0] <= goal[0] and 2 * side[1] <= goal[1]:
        side = [2 * size for size in side]
        last = 2 * side[0] > goal[0] or 2 * side[1] > goal[1]
        narrow = max(width // 2, 1) if last else width
        layers += [nn.ReLU(), nn.ConvTranspose2d(width, narrow, 4, stride=2, padding=1)]
        width = narrow
    if side != goal:
        layers += [nn.ReLU(), bridge(width, width, (side[0], side[1]), (goal[0], goal[1]))]
    layers.append(nn.ReLU())
    if len(target) == 3:
        layers.append(nn.Conv2d(width, target[0], 3, padding=1))
    else:
        layers += [nn.Flatten(), nn.Linear(width * prod(goal), prod(target)), nn.Unflatten(1, target)]
    return nn.Sequential(*layers)


def _small(size: int) -> int:
    """Halve a size as long as more than four are left."""
    while size > 4:
        size //= 2
    return size


@dataclass(frozen=True)
class Scale:
    """Maps `value_range` to [-1, 1]; data without a range are left unchanged."""

    value_range: tuple[float, float] | None

    @property
    def bounded(self) -> bool:
        """Whether the data have a value range."""
        return self.value_range is not None

    @property
    def unit(self) -> float:
        """Factor from a difference in network units to one in units of the data."""
        return 1.0 if self.value_range is None else (self.value_range[1] - self.value_range[0]) / 2

    def down(self, x: Tensor) -> Tensor:
        """Return data in network units."""
        return x if self.value_range is None else (x - self.value_range[0]) / self.unit - 1

    def up(self, x: Tensor) -> Tensor:
        """Return a network's output in units of the data."""
        return x if self.value_range is None else (x + 1) * self.unit + self.value_range[0]
