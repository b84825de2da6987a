"""Worlds in which attacks on labels are compared: enough victims to tell a choice that is as good as the truth's."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import splitfed
from splitfed.core.defense import Defense
from splitfed.core.random import generator, stream
from splitfed.core.tasks import binary
from splitfed.data.dataset import Dataset
from splitfed.topologies import vertical
from splitfed.training.run import Run


@cache
def pair(*defenses: Defense) -> Run:
    """Two classes, three in ten positive, four columns a party; 250 victims, a server with labels and a trained top."""
    drawn = generator(3, "pair")
    x = torch.randn(900, 8, generator=drawn)
    raw = x @ torch.randn(8, generator=drawn) - 1.5 + torch.randn(900, generator=drawn)
    data = Dataset("pair", x, (raw > 0).long(), binary()).vertical({"left": range(4), "right": range(4, 8)})
    with stream(0):
        bottoms = {role: nn.Sequential(nn.Linear(4, 8), nn.ReLU()) for role in ("left", "right")}
        top = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    clients = data.clients(1, auxiliary=104, victims=250)
    return splitfed.train(vertical(bottoms, top, labels="server"), clients, rounds=3, defenses=defenses)


@cache
def sums(*defenses: Defense) -> Run:
    """Halves of digits, the two parties' logits only added up; 200 victims."""
    with stream(0):
        bottoms = {
            role: nn.Sequential(nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 10))
            for role in ("left", "right")
        }
    data = splitfed.data.digits().halves().clients(1, auxiliary=200, victims=200)
    topology = vertical(bottoms, nn.Identity(), labels="server", fusion="sum")
    return splitfed.train(topology, data, rounds=1, defenses=defenses)
