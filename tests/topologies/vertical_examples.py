"""Vertical runs whose active party holds features, labels and the top of the model, as attacks on its peers need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import nn

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, generator, stream
from splitfed.core.topology import Segment, Topology
from splitfed.topologies import custom
from splitfed.topologies.fusion import Fusion
from splitfed.training.run import Run


def perceptron(widths: Sequence[int], seed: int) -> nn.Sequential:
    """Return linear layers of these widths, from the flattened input on, with a ReLU between any two."""
    with stream(derive(seed, "perceptron", *widths)):
        layers: list[nn.Module] = [nn.Flatten()]
        for pair in pairwise(widths):
            layers += [nn.Linear(*pair), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolution(seed: int, channels: int = 4) -> nn.Sequential:
    """Return a 3x3 convolution of a grey strip with average pooling: (n, 1, h, w) to (n, channels, h / 2, w / 2)."""
    with stream(derive(seed, "convolution", channels)):
        return nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))


def with_active(bottoms: Mapping[str, nn.Module], top: nn.Module) -> Topology:
    """Return a vertical topology without a server: the role "active", one of the `bottoms`, joins them under `top`.

    It owns the labels too; its party is called active0.
    """
    segments = [Segment(f"bottom_{r}", r, m, (r,), (f"z_{r}",)) for r, m in bottoms.items()]
    joined = tuple(f"z_{role}" for role in bottoms)
    segments.append(Segment("fusion", "active", Fusion("concat"), joined, ("joined",)))
    segments.append(Segment("top", "active", top, ("joined",), ("out",)))
    return custom(segments, {role: role for role in bottoms}, [{"value": "out", "labels": "active"}])


LINKED = {"peer": range(6), "active": range(6, 12)}


def linked(rows: int = 400) -> sf.Dataset:
    """Twelve columns in (0, 1), of two hidden numbers: the peer's six are curved in them, the active party's not."""
    random = generator(3, "linked")
    u = torch.rand(rows, 2, generator=random)
    mixed = u @ torch.rand(2, 12, generator=random) / 2
    mixed[:, :6] = (3 * mixed[:, :6]).sin().square()
    x = (mixed + 0.02 * torch.rand(rows, 12, generator=random)).clamp(0, 1)
    return sf.Dataset("linked", x, (u[:, 0] > 0.5).long(), sf.classification(2), (0.0, 1.0))


@cache
def planted(*defenses: Defense) -> Run:
    """The peer's bottom releases eight numbers, bent by a ReLU, of its six columns."""
    data = linked().vertical(LINKED).clients(1, auxiliary=100, victims=128, validation=0.0)
    bottoms = {"peer": perceptron((6, 16, 8), 1), "active": perceptron((6, 4), 2)}
    return train(with_active(bottoms, perceptron((12, 2), 3)), data, rounds=5, defenses=defenses)


def train(topology: sf.Topology, data: sf.Federation, rounds: int = 1, defenses: tuple[Defense, ...] = ()) -> Run:
    return sf.train(topology, data, rounds=rounds, optimizer=Optim("Adam", {"lr": 3e-3}), defenses=defenses)
