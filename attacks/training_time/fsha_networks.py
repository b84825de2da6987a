"""The networks of feature-space hijacking on images: a plain encoder, a plain decoder, a residual critic.

Paper: Pasquini, Ateniese, Bernaschi, "Unleashing the tiger: inference attacks on split learning", CCS 2021; layouts
after the authors' published code (pasquini-dario/SplitNN_FSHA).

The encoder halves the image by 3x3 convolutions of stride 2 until it has the size of the cut, a last convolution makes
the cut's channels; it has no activation, so it is linear, and so is the decoder up to its tanh. Widths of the encoder
double towards the channels of the cut (64, 128, 256, 256 to a cut of 256 channels, as the authors'). The critic has
`blocks` residual blocks (six) of `width` channels (256) at the size of the cut. Weights start as in Keras, Glorot's
uniform with no bias: at rates of 1e-5 they stay near where they start.

Deviates: sizes that halving does not reach are interpolated to; more than three halvings continue the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from splitfed.attacks.networks.networks import Residual, Shape

_FULL = 3  # from this many halvings on the last one makes the image itself


def halved_sizes(source: Shape, target: Shape) -> list[tuple[int, int]]:
    """Return the sizes from that of `source` (channels, height, width) towards `target`'s, halved (rounded up)."""
    found = [(source[1], source[2])]
    goal = (target[1], target[2])
    while found[-1][0] > goal[0] and found[-1][1] > goal[1]:
        height, width = ((size + 1) // 2 for size in found[-1])
        if height < goal[0] or width < goal[1]:
            break
        found.append((height, width))
    return found


def fsha_encoder(source: Shape, target: Shape) -> nn.Sequential:
    """Return an untrained network from images (n, *source) to (n, *target), the shape of a cut."""
    steps, channels = halved_sizes(source, target), source[0]
    layers: list[nn.Module] = []
    for left in reversed(range(len(steps) - 1)):
        width = max(target[0] >> min(left, _FULL - 1), 1)
        layers.append(nn.Conv2d(channels, width, 3, stride=2, padding=1))
        channels = width
    layers += _resize(steps[-1], (target[1], target[2]))
    layers.append(nn.Conv2d(channels, target[0], 3, padding=1))
    return glorot(nn.Sequential(*layers))


def fsha_decoder(source: Shape, target: Shape, width: int, bounded: bool) -> nn.Sequential:
    """Return an untrained network from a cut (n, *source) to images (n, *target), in (-1, 1) if `bounded`.

    It has `width` channels after the first doubling, halved at each further one.
    """
    steps = halved_sizes(target, source)[::-1]
    layers, channels = _resize((source[1], source[2]), steps[0]), source[0]
    whole = len(steps) > _FULL
    for number, (small, large) in enumerate(pairwise(steps)):
        last = whole and number == len(steps) - 2
        wide = target[0] if last else max(width >> number, 1)
        spare = (large[0] - 2 * small[0] + 1, large[1] - 2 * small[1] + 1)
        layers.append(nn.ConvTranspose2d(channels, wide, 3, stride=2, padding=1, output_padding=spare))
        channels = wide
    if not whole:
        layers.append(nn.Conv2d(channels, target[0], 3, padding=1))
    if bounded:
        layers.append(nn.Tanh())
    return glorot(nn.Sequential(*layers))


def fsha_critic(shape: Shape, width: int, blocks: int) -> nn.Sequential:
    """Return an untrained network from every row of (n, *shape), the shape of a cut, to one number: (n,)."""
    half = prod((size + 1) // 2 for size in shape[1:])
    layers = [nn.Conv2d(shape[0], width, 3, padding=1), *(Residual(width) for _ in range(blocks))]
    layers += [nn.Conv2d(width, width, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(width * half, 1)]
    return glorot(nn.Sequential(*layers, nn.Flatten(0)))


def glorot(net: nn.Sequential) -> nn.Sequential:
    """Redraw the weights of `net` from Glorot's uniform distribution, set biases to zero, and return it."""
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return net


def _resize(side: Sequence[int], goal: tuple[int, int]) -> list[nn.Module]:
    return [] if tuple(side) == goal else [nn.Upsample(goal, mode="bilinear", align_corners=False)]
