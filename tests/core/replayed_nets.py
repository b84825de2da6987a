"""Models that can only be cut by replay, with all that one may leave behind in a party; for tests of isolation."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.topology import Topology
from splitfed.topologies import local, multi_hop, u_shaped, vanilla


@dataclass
class Hidden:
    """What a body returns: an object that no table of torch knows."""

    state: Tensor
    gate: Tensor


class Features(OrderedDict[str, Tensor]):
    """A table of a kind of its own."""


class Body(nn.Module):
    def __init__(self, table: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.gate = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.table = table

    def forward(self, x: Tensor) -> Hidden | Features:
        state, gate = functional.relu(self.norm(self.layer(x))), torch.sigmoid(self.gate(x))
        return Features(state=state, gate=gate) if self.table else Hidden(state, gate)


class ReplayedNet(nn.Module):
    """Images (rows, 1, 8, 8) to ten logits: branches on the mode, hooks, buffers of every kind, objects."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        self.body, self.second = Body(table=False), Body(table=True)
        self.gain, self.head = nn.Parameter(torch.rand(16)), nn.Linear(16, 10)
        self.register_buffer("table", torch.rand(16))
        self.register_buffer("mask", torch.rand(16), persistent=False)
        self.register_buffer("mean", torch.zeros(16))
        self.head.register_forward_pre_hook(halve)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        h = functional.dropout(self.stem(x) * scale * self.table, 0.1, training=self.training)
        hidden = self.body(h)
        h = hidden.state * hidden.gate * self.gain
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        found = self.second((h - self.mean) * self.mask)
        ramp = torch.linspace(0.5, 1.0, h.shape[1], device=next(self.parameters()).device)
        return {"logits": self.head(found["state"] * found["gate"] * self.table * ramp)}


def halve(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """A hook: half of what comes in."""
    half: Tensor = inputs[0] * 0.5
    return half


def replayed_net() -> ReplayedNet:
    """Return the net with weights that are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ReplayedNet()


EXAMPLE = torch.linspace(-1.0, 1.0, 8 * 64).view(8, 1, 8, 8)


def replayed_topology(name: str, model: nn.Module | None = None, example: Tensor = EXAMPLE) -> Topology:
    """Return the topology `name` of `model`, cut by replay."""
    net, cuts = model or replayed_net(), ["stem", "body", "second"]
    if name == "vanilla":
        return vanilla(net, "body", example=example)
    if name == "u_shaped":
        return u_shaped(net, cuts[::2], example=example)
    if name == "two trips":
        return u_shaped(net, ["stem", "body", "second.norm", "second"], example=example)
    if name == "local":
        return local(net, cuts, example=example)
    return multi_hop(net, cuts if name == "client" else cuts[:2], labels=name, example=example)


REPLAYED = ("vanilla", "u_shaped", "two trips", "relayed", "client", "server", "local")
