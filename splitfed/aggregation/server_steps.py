"""Server steps: the aggregation server moves its weights by its clients' mean change instead of taking their mean.

Paper: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021,
algorithm 2 (FedAdagrad, FedAdam, FedYogi); Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution
for federated visual classification", 2019 (FedAvgM).

d is the aggregate of the round's uploads minus w, the weights of the aggregation server before the round. Adaptive
steps keep m <- beta1 m + (1 - beta1) d, which starts at zero, and v, which starts at tau^2, and move w by rate m /
(sqrt(v) + tau), without bias correction, as in the paper. All is computed element by element in double precision; the
aggregation server keeps m and v from round to round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.aggregation.lookup import named_table, parameters_of_table
from splitfed.core.errors import check_fields, require_number, unknown

Memory = dict[str, Tensor]

RATE = require_number("server_step rate", low=0.0, open_low=True)
BETA1 = require_number("server_step beta1", low=0.0, high=1.0, open_high=True)
BETA2 = require_number("server_step beta2", low=0.0, high=1.0, open_high=True)


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """Base of all server steps: `rate` > 0 is the paper's eta; a subclass implements `move`."""

    rate: float = field(default=1.0, metadata=RATE)

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters that the metadata of their fields do not allow."""
        check_fields(self)

    def move(self, change: Tensor, memory: Memory) -> Tensor:
        """Return the amount to add to one weight tensor; `change`: the clients' mean change of it, in double precision.

        `memory`: the state kept for this weight between rounds, tensors of the shape of `change`; empty at first.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerStep):
    """v <- momentum v + d; w moves by rate v. `momentum` in [0, 1); momentum 0 with rate 1 is plain averaging."""

    momentum: float = field(default=0.9, metadata=require_number("fedavgm momentum", low=0.0, high=1.0, open_high=True))

    def move(self, change: Tensor, memory: Memory) -> Tensor:
        """Return rate v."""
        memory["v"] = change + self.momentum * memory["v"] if "v" in memory else change
        return self.rate * memory["v"]


@dataclass(frozen=True, kw_only=True)
class AdaptiveStep(ServerStep):
    """Base of the adaptive steps: `beta1` in [0, 1), `tau` > 0 in the denominator; a subclass implements `follow`."""

    rate: float = field(default=0.01, metadata=RATE)
    beta1: float = field(default=0.9, metadata=BETA1)
    tau: float = field(default=1e-3, metadata=require_number("server_step tau", low=0.0, open_low=True))

    def follow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new v from `v` and `square`, which is d squared."""
        raise NotImplementedError

    def move(self, change: Tensor, memory: Memory) -> Tensor:
        """Return rate m / (sqrt(v) + tau)."""
        m = memory.get("m", torch.zeros_like(change))
        v = memory.get("v", torch.full_like(change, self.tau**2))
        memory["m"] = self.beta1 * m + (1 - self.beta1) * change
        memory["v"] = self.follow(v, change.square())
        return self.rate * memory["m"] / (memory["v"].sqrt() + self.tau)


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(AdaptiveStep):
    """v <- v + d^2; by default without momentum (beta1 = 0)."""

    beta1: float = field(default=0.0, metadata=BETA1)

    def follow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v + d^2, the sum of all squares."""
        return v + square


@dataclass(frozen=True, kw_only=True)
class FedAdam(AdaptiveStep):
    """v <- beta2 v + (1 - beta2) d^2; `beta2` in [0, 1)."""

    beta2: float = field(default=0.99, metadata=BETA2)

    def follow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the exponential moving average of the squares."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class FedYogi(AdaptiveStep):
    """v <- v - (1 - beta2) d^2 sign(v - d^2); `beta2` in [0, 1)."""

    beta2: float = field(default=0.99, metadata=BETA2)

    def follow(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v moved towards the square by (1 - beta2) times the square."""
        return v - (1 - self.beta2) * square * torch.sign(v - square)


SERVER_STEPS: Mapping[str, type[ServerStep]] = {
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}


def server_step_of(given: object) -> ServerStep | None:
    """Return the server step of this name, or the one that a table with name and parameters describes, or None."""
    if given is None or isinstance(given, ServerStep):
        return given
    table = named_table("server_step", given, "a ServerStep, or None")
    name = table["name"]
    if name not in SERVER_STEPS:
        raise unknown("server_step", name, SERVER_STEPS)
    kind = SERVER_STEPS[name]
    return kind(**parameters_of_table(f"parameter of server_step {name!r}", kind, table, "name"))
