"""A toy world for attacks that live inside training: rows of one hidden number, and a client of two layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Target
from splitfed.attacks.training_time.attack_site import AttackSite
from splitfed.attacks.training_time.fsha import Fsha
from splitfed.attacks.training_time.pcat import Pcat
from splitfed.attacks.training_time.sdar import Sdar
from splitfed.attacks.training_time.training_attack import Seen, TrainingAttack, TrainingAttackState
from splitfed.core.messages import View
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset, Federation
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from tests.federated.examples import shared_probes

ALL: dict[str, TrainingAttack] = {
    "fsha": Fsha(width=8),
    "sdar": Sdar(width=8),
    "sdar, client's layout": Sdar(width=8, layout="client"),
    "pcat": Pcat(width=8, start=3, inverse_steps=5, refine=2),
}


@dataclass(frozen=True)
class Spy(TrainingAttack):
    """Keeps what it sees; sends ones where it is to be active."""

    loud: bool = False

    def enter(self, site: AttackSite) -> TrainingAttackState:
        return (Loud if self.loud else Passive)(self, site)


class Passive(TrainingAttackState):
    def build(self) -> None:
        self.seen: list[tuple[Seen, dict[str, nn.Module]]] = []

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> Tensor | None:
        self.seen.append((seen, dict(modules)))
        return torch.ones_like(seen.z)

    def predict(self, view: View, target: Target) -> Tensor:
        return self.site.released(view)


class Loud(Passive):
    active: ClassVar[bool] = True


class Small(nn.Module):
    """16 features, `width` numbers at the first cut, 8 at the second, two classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, width))
        self.second = nn.Sequential(nn.Linear(width, 8), nn.ReLU())
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two scores a row."""
        return self.last(self.second(self.first(x)))


def small(seed: int = 0, width: int = 2) -> Small:
    with stream(seed):
        return Small(width)


@cache
def placed(shape: str, seed: int, width: int) -> Topology:
    """That model at a client and a server; one for all runs, which train copies of it."""
    model = small(seed, width)
    return vanilla(model, "first") if shape == "vanilla" else u_shaped(model, ("first", "second"))


@cache
def ramps(clients: int = 1, train: int = 256, victims: int = 64) -> Federation:
    """Rows 2 b * (0.2, ..., 1) - 1 with a skewed brightness b, which a match of distributions alone can find again; the
    label says whether b is above its median, 1/8."""  # fmt: skip
    rows = train * clients + 200 + victims
    random = generator(1, "ramps")
    b = torch.rand(rows, 1, generator=random) ** 3
    x = 2 * b * torch.linspace(0.2, 1, 16) + 0.04 * torch.rand(rows, 16, generator=random) - 1
    data = Dataset("ramps", x, (b[:, 0] > 0.125).long(), classification(2), (-1.0, 1.04))
    return data.clients(clients, auxiliary=200, victims=victims, validation=0.0, test=0.0)


@cache
def mirror() -> Federation:
    """Rows b * (0.2, ..., 1) with b uniform in [-1, 1], as many as their negatives; the label says which sign b has.

    Matching distributions cannot tell a row from its negative, nor can labels alone tell how large b is.
    """
    random = generator(1, "mirror")
    b = 2 * torch.rand(520, 1, generator=random) - 1
    x = b * torch.linspace(0.2, 1, 16) + 0.02 * (2 * torch.rand(520, 16, generator=random) - 1)
    data = Dataset("mirror", x, (b[:, 0] > 0).long(), classification(2), (-1.02, 1.02))
    return data.clients(1, auxiliary=200, victims=64, validation=0.0, test=0.0)


def go(plan: Any = None, shape: str = "vanilla", rounds: int = 1, rate: float = 1e-3, **changes: Any) -> Run:
    """Train on ramps with `plan` at the server."""
    topology = placed(shape, changes.get("seed", 0), changes.pop("width", 2))
    arguments = {"batch_size": 32, "optimizer": Optim("Adam", {"lr": rate}), **changes}
    data = arguments.pop("data", None) or ramps()
    adversaries = arguments.pop("adversaries", splitfed.Adversaries())
    if plan is not None:
        adversaries = replace(adversaries, training_attacks={"server": plan})
    with shared_probes():
        return splitfed.train(topology, data, rounds=rounds, adversaries=adversaries, **arguments)


def attack_state(run: Run) -> TrainingAttackState:
    found = run.engine.training_attacks["server"]
    assert isinstance(found, TrainingAttackState)
    return found


def error(run: Run, prediction: Tensor) -> tuple[float, float]:
    """Mean squared error of `prediction` and of the mean of the auxiliary rows."""
    victims, mean = run.data.victims.x, run.data.auxiliary.x.mean(0)
    return float((prediction - victims).square().mean()), float((mean - victims).square().mean())
