"""Toy net: one hidden layer.

Paper: none; an example of a plug-in.
"""

from __future__ import annotations

import math

from torch import nn

from splitfed.core.random import initialization


class ToyNet(nn.Sequential):
    """A network that can be cut after its ReLU."""

    cuts: tuple[str, ...] = ("relu",)


def toy_net(shape: tuple[int, ...], outputs: int, width: int = 16, *, seed: int | None = 0) -> ToyNet:
    """Return flatten, hidden, relu and output for rows of any `shape`."""
    with initialization(seed):
        net = ToyNet()
        net.add_module("flatten", nn.Flatten())
        net.add_module("hidden", nn.Linear(math.prod(shape), width))
        net.add_module("relu", nn.ReLU())
        net.add_module("output", nn.Linear(width, outputs))
        return net
