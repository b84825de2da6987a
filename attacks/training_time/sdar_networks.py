"""The decoder and the two critics of SDAR on images, with batch normalisation, and the end of a generic simulator.

Paper: Zhu, Luo, Wu, Xiao, "Passive inference attacks on split learning via adversarial regularization", NDSS 2025;
layouts after the authors' published code (zhxchd/SDAR_SplitNN).

With `width` 64 and `blocks` 3 they are the authors' behind a cut of 8x8 (ResNet-20 at level 7) or 32x32 (level 3), and
critics behind one of 16x16 too. The decoder doubles the cut by repetition; each doubling is followed by one convolution
and `blocks` - 1 narrower ones, the last by `blocks`. The critic of cuts halves them to 8x8, has `blocks` convolutions
there and halves once more; that of images halves them three times. Critics have leaky ReLU of slope 0.2 and dropout 0.4
before their last layer. A label becomes one more channel of what comes in. Weights start as in Keras: Glorot's uniform,
no bias, words of labels in [-0.05, 0.05].

Deviates: the authors' decoder also mirrors the blocks that the client has behind its last halving; ours does not count
them. Sizes that doubling does not reach are interpolated to.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.networks.networks import LabelChannel, Shape
from splitfed.attacks.training_time.fsha_networks import glorot, halved_sizes

_SMALL, _WORD, _SLOPE, _DROPOUT = 8, 0.05, 0.2, 0.4


class ReleaseEnd(nn.Module):
    """Last layers of a generic simulator for (n, *shape), as of a client's block: batch normalisation, then ReLU.

    After `observe` has received a negative number, it is the identity, as the client ends differently.
    """

    signed: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(shape[0])
        self.register_buffer("signed", torch.tensor(False))

    def observe(self, z: Tensor) -> None:
        """Check whether the received values (n, *shape) contain a negative number."""
        self.signed |= (z < 0).any()

    def forward(self, z: Tensor) -> Tensor:
        """Return (n, *shape), with each channel normalised over rows and places."""
        if self.signed:
            return z
        return functional.relu(self.norm(z.flatten(2) if z.dim() > 2 else z)).view_as(z)


class SdarDecoder(nn.Module):
    """Maps a cut (n, *source) to images (n, *target), in (-1, 1) if bounded; with a label input if `classes`."""

    def __init__(
        self, source: Shape, target: Shape, width: int, blocks: int, classes: int | None, bounded: bool
    ) -> None:
        super().__init__()
        steps = halved_sizes(target, source)[::-1]
        self.label, channels = _labelled(source, classes)
        layers: list[nn.Module] = []
        if steps[0] != (source[1], source[2]):
            layers.append(nn.Upsample(steps[0]))
        for number, size in enumerate(steps[1:]):
            left = len(steps) - 2 - number
            wide, narrow = (max(width >> max(less - left, 0), 1) for less in (1, 2))
            layers.append(nn.Upsample(size))
            for outputs in (wide, *[narrow] * (blocks - bool(left))):
                layers += _convolution(channels, outputs)
                channels = outputs
        if len(steps) == 1:
            for _ in range(blocks):
                layers += _convolution(channels, max(width >> 2, 1))
                channels = max(width >> 2, 1)
        layers.append(nn.Conv2d(channels, target[0], 3, padding=1))
        if bounded:
            layers.append(nn.Tanh())
        self.net = glorot(nn.Sequential(*layers))

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Return (n, *target); `y`: (n,) labels, if the network has classes."""
        found: Tensor = self.net(z if self.label is None else self.label(z, y))
        return found


class _Critic(nn.Module):
    """Layers, and a linear layer from their output to one number a row."""

    label: LabelChannel | None
    net: nn.Sequential

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return (n,); `y`: (n,) labels, if the network has classes."""
        found: Tensor = self.net(x if self.label is None else self.label(x, y))
        return found.squeeze(1)


class CutCritic(_Critic):
    """Maps every row of (n, *shape), the shape of a cut, to one number."""

    def __init__(self, shape: Shape, width: int, blocks: int, classes: int | None) -> None:
        super().__init__()
        self.label, channels = _labelled(shape, classes)
        size, halvings = [shape[1], shape[2]], 0
        while max(_halve(size, halvings)) > _SMALL:
            halvings += 1
        wide = max(2 * width >> halvings, 1)
        layers: list[nn.Module] = [nn.Conv2d(channels, wide, 3, padding=1), nn.LeakyReLU(_SLOPE)]
        for stride, outputs in (
            *((2, max(2 * width >> left, 1)) for left in reversed(range(halvings))),
            *[(1, 4 * width)] * blocks,
        ):
            layers += _convolution(wide, outputs, stride, _SLOPE)
            wide = outputs
        layers.append(nn.Conv2d(wide, 4 * width, 3, stride=2, padding=1))
        self.net = _critic_layers(layers, 4 * width * prod(_halve(size, halvings + 1)))


class SdarCritic(_Critic):
    """Maps every image of (n, *shape) to one number."""

    def __init__(self, shape: Shape, width: int, classes: int | None) -> None:
        super().__init__()
        self.label, channels = _labelled(shape, classes)
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(_SLOPE)]
        layers += _convolution(width, 2 * width, 2, _SLOPE) + _convolution(2 * width, 2 * width, 2, _SLOPE)
        layers += [nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.LeakyReLU(_SLOPE)]
        self.net = _critic_layers(layers, 4 * width * prod(_halve([shape[1], shape[2]], 3)))


def _labelled(shape: Shape, classes: int | None) -> tuple[LabelChannel | None, int]:
    """Return the label channel for (n, *shape), if there are classes, and the resulting number of channels."""
    if classes is None:
        return None, shape[0]
    label = LabelChannel(shape, classes)
    nn.init.uniform_(label.embedding.weight, -_WORD, _WORD)
    glorot(nn.Sequential(label.spread))
    return label, label.shape[0]


def _convolution(inputs: int, outputs: int, stride: int = 1, slope: float = 0.0) -> list[nn.Module]:
    bend = nn.LeakyReLU(slope) if slope else nn.ReLU()
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), bend]


def _critic_layers(layers: list[nn.Module], left: int) -> nn.Sequential:
    return glorot(nn.Sequential(*layers, nn.Flatten(), nn.Dropout(_DROPOUT), nn.Linear(left, 1)))


def _halve(size: list[int], times: int) -> list[int]:
    """Return `size` halved so many times, rounded up."""
    return [-(-length // 2**times) for length in size]
