"""Small encrypted trainings: models whose server segment is of every allowed make, and rows of digits."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.data.dataset import Federation
from splitfed.encryption.stages import Square
from splitfed.encryption.weight_shares import merge_weight_shares
from splitfed.topologies import u_shaped

WIDE, NARROW = 6, 5
STEP = sf.Optim("SGD", {"lr": 0.05, "momentum": 0.9})
PLAIN_STEP = sf.Optim("SGD", {"lr": 0.05})


class SquareBetween(nn.Module):
    """Two linear layers with a square between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, 4), nn.Linear(4, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) ** 2)


class SquareBehind(nn.Module):
    """A linear layer, squared."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDE, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        return torch.square(self.only(x))


class SquareBefore(nn.Module):
    """A linear layer of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDE, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x * x)


MIDDLES: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDE, NARROW),
    "two linear": lambda: nn.Sequential(nn.Linear(WIDE, 4), nn.Linear(4, NARROW, bias=False)),
    "square behind": SquareBehind,
    "square between": SquareBetween,
    "square before": SquareBefore,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, WIDE)), nn.Conv1d(1, 1, 2), nn.Flatten()),
}


def model(middle: str = "linear") -> nn.Sequential:
    """Return a model of digits whose submodule "middle" the server evaluates."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDE), nn.Tanh())
    head = nn.Sequential(nn.Tanh(), nn.Linear(NARROW, 10))
    return nn.Sequential(OrderedDict(features=features, middle=MIDDLES[middle](), head=head))


def rows(clients: int = 1, each: int = 24) -> Federation:
    """Return a few rows of digits for so many clients, with test rows: `each` to train on, a few more or less."""
    few = sf.data.digits().rows(range(clients * each + 24))
    return few.clients(clients, auxiliary=8, victims=8, validation=0.0, test=0.25, seed=0)


def train(
    settings: sf.Encryption | None, middle: str = "linear", data: Federation | None = None, **options: Any
) -> sf.Run:
    """Train two rounds of a model on a few rows, encrypted as `settings` say."""
    topology = u_shaped(model(middle), ["features", "middle"], encryption=settings)
    given = {"rounds": 2, "batch_size": 12, "optimizer": STEP, **options}
    return sf.train(topology, rows() if data is None else data, **given)


def whole_state(run: sf.Run, client: int = 0) -> dict[str, Tensor]:
    """Return the state of the undivided model, with the segments of one client."""
    place = run.engine.run_parties.replicas[client]
    modules = {name: module for party in place.parties.values() for name, module in party.state.modules.items()}
    return merge_weight_shares(place.topology, modules)


def largest_difference(first: sf.Run, second: sf.Run) -> float:
    """Return the largest difference of two runs' weights, with the segments of the client that trained last."""
    last = first.engine.replicas - 1
    one, two = whole_state(first, last), whole_state(second, last)
    assert list(one) == list(two)
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def settings(**changes: Any) -> sf.Encryption:
    """Return settings of the protocol that leaks nothing, with small bounds."""
    return replace(sf.Encryption(bound=4.0, precision=1e-2), **changes)


class Deep(nn.Module):
    """A model whose server segment has three linear layers with squares between them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDE), nn.Tanh())
        layers = [nn.Linear(WIDE, 4), Square(), nn.Linear(4, 4), Square(), nn.Linear(4, NARROW)]
        self.middle, self.head = nn.Sequential(*layers), nn.Sequential(nn.Tanh(), nn.Linear(NARROW, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.features(x)))
