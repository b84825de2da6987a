"""Trained runs that attacks are tried on: worlds planted so that something leaks, and the same where nothing can."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.defense import Defense, GradientDefense
from splitfed.core.defense_context import Context
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import binary, classification
from splitfed.core.topology import Head, Segment, Topology
from splitfed.data.dataset import Dataset, Federation
from splitfed.encryption.settings import Encryption
from splitfed.engines.base import FED
from splitfed.federated import FedDistill, FedProto
from splitfed.models.lenet import lenet
from splitfed.models.mlp import mlp
from splitfed.topologies import local, u_shaped, vanilla, vertical
from splitfed.training.run import Run

ADAM = Optim("Adam", {"lr": 3e-3})


@cache
def digits() -> Federation:
    """Real digits of one client, 24 of them victims."""
    return splitfed.data.digits().clients(1, auxiliary=400, victims=24)


@cache
def lenet_run(*defenses: Defense, cut: str = "relu1", rounds: int = 3) -> Run:
    """LeNet on digits, cut after its first ReLU."""
    with stream(0):
        model = lenet((1, 8, 8), 10, seed=None)
    return splitfed.train(vanilla(model, cut), digits(), rounds=rounds, optimizer=ADAM, defenses=defenses)


@dataclass(frozen=True, kw_only=True)
class Drowned(GradientDefense):
    """Replaces every gradient by noise that knows nothing."""

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return normal noise in the shape of `g`."""
        return torch.randn(g.shape, generator=context.generator(name, g.device))


def drowned(make: Callable[..., Run]) -> Run:
    """Return the run of `make` in which what comes back on every edge is noise."""
    return make(Drowned(on=tuple(edge.name for edge in make().engine.topology.crossings)))


def rare(rows: int = 900) -> Dataset:
    """Rows of eight columns, one positive in nine, four columns a party."""
    drawn = generator(3, "rare")
    x = torch.randn(rows, 8, generator=drawn)
    raw = x @ torch.randn(8, generator=drawn) - 4.0 + torch.randn(rows, generator=drawn)
    return Dataset("rare", x, (raw > 0).long(), binary()).vertical({"left": range(4), "right": range(4, 8)})


@cache
def two_party(*defenses: Defense) -> Run:
    """Rare positives; two parties, and a server with labels and a trained top."""
    with stream(0):
        bottoms = {role: nn.Sequential(nn.Linear(4, 8), nn.ReLU()) for role in ("left", "right")}
        top = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    data = rare().clients(1, auxiliary=100, victims=128)
    return splitfed.train(vertical(bottoms, top, labels="server"), data, rounds=3, defenses=defenses)


@cache
def summed(*defenses: Defense, fusion: str = "sum") -> Run:
    """Halves of digits; the two parties' logits are only added up."""
    with stream(0):
        bottoms = {
            role: nn.Sequential(nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 10))
            for role in ("left", "right")
        }
    data = splitfed.data.digits().halves().clients(1, auxiliary=200, victims=48)
    return splitfed.train(
        vertical(bottoms, nn.Identity(), labels="server", fusion=fusion), data, rounds=1, defenses=defenses
    )


@cache
def u_digits(*defenses: Defense) -> Run:
    """Digits in a U: the server sees no label."""
    with stream(0):
        model = mlp((1, 8, 8), 10, (32, 16), seed=None)
    data = splitfed.data.digits().clients(1, auxiliary=200, victims=96)
    return splitfed.train(u_shaped(model, ("relu1", "relu2")), data, rounds=1, defenses=defenses)


def encrypted_u(protocol: str | None, hidden: int | None = None) -> Topology:
    """Digits in a U whose server, one linear layer, computes on ciphertexts by `protocol`; None: in plain.

    The server's layer returns the logits, or `hidden` features of which a layer of the client makes them.
    """
    with stream(0):
        parts = {
            "features": nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh()),
            "middle": nn.Linear(6, hidden or 10),
            "head": nn.Identity() if hidden is None else nn.Sequential(nn.Tanh(), nn.Linear(hidden, 10)),
        }
    settings = None
    if protocol is not None:
        settings = Encryption(
            protocol=protocol, accept_leak=True, parameters="depth_1_coarse", bound=2.0, precision=1e-2
        )
    return u_shaped(nn.Sequential(OrderedDict(parts)), ("features", "middle"), encryption=settings)


@cache
def encrypted_digits(protocol: str, rate: float = 0.5, hidden: int | None = None, momentum: float = 0.0) -> Run:
    """That U after two steps of ten rows at most, for ten classes; 12 victims."""
    data = splitfed.data.digits().rows(range(70)).clients(1, auxiliary=40, victims=12, validation=0.0, test=0.3)
    optimizer = Optim("SGD", {"lr": rate, "momentum": momentum})
    return splitfed.train(encrypted_u(protocol, hidden), data, rounds=1, batch_size=10, optimizer=optimizer)


MEMBER_ROUNDS, MEMBER_BATCH = 40, 20


@cache
def three_classes(*defenses: Defense, telling: bool = True) -> Run:
    """A table in two parts: the left one tells three classes apart, the right one is noise; or both say nothing."""
    random = generator(4, "three")
    y = torch.randint(3, (420,), generator=random)
    shown = y if telling else torch.randint(3, (420,), generator=random)
    left = torch.eye(3)[shown] + 0.1 * torch.randn(420, 3, generator=random)
    x = torch.cat([left, 2 * torch.randn(420, 12, generator=random)], 1)
    data = Dataset("three", x, y, classification(3)).vertical({"left": range(3), "right": range(3, 15)})
    with stream(0):
        bottoms = {"left": nn.Linear(3, 3), "right": nn.Linear(12, 3)}
        top = nn.Linear(6, 3)
    clients = data.clients(1, auxiliary=60, victims=100)
    return splitfed.train(vertical(bottoms, top, labels="server"), clients, rounds=20, defenses=defenses)


@cache
def noted() -> Federation:
    """60 digits to train on, half of them with labels drawn at random, and 60 that nobody trains on."""
    drawn = generator(1, "membership")
    every = splitfed.data.digits()
    some = every.rows(torch.randperm(len(every), generator=drawn)[:280])
    wrong = torch.rand(len(some), generator=drawn) < 0.5
    y = torch.where(wrong, torch.randint(0, 10, (len(some),), generator=drawn), some.y)
    noisy = Dataset("digits", some.x, y, some.task, some.value_range)
    return noisy.clients(1, auxiliary=160, victims=60, validation=0.0, test=0.0)


@cache
def by_heart(*defenses: Defense, cut: str = "relu2", decay: float = 0.0) -> Run:
    """A model that learnt its 60 rows by heart; with `decay` of its weights it could not."""
    with stream(0):
        model = mlp((1, 8, 8), 10, (64, 32), seed=None)
    return splitfed.train(
        vanilla(model, cut),
        noted(),
        rounds=MEMBER_ROUNDS,
        batch_size=MEMBER_BATCH,
        optimizer=Optim("Adam", {"lr": 3e-3, "weight_decay": decay}),
        defenses=defenses,
        evaluation=splitfed.Evaluation(every=MEMBER_ROUNDS),
    )


@cache
def odd_digits() -> Federation:
    """The task: is a digit five or more. The private attribute: is it odd, of which the task says next to nothing."""
    every = splitfed.data.digits()
    data = Dataset("digits", every.x, (every.y >= 5).long(), classification(2), every.value_range)
    return data.with_target("odd", every.y % 2, classification(2)).clients(1, auxiliary=400, victims=100)


@cache
def odd_run(*defenses: Defense) -> Run:
    """LeNet on that task."""
    with stream(0):
        model = lenet((1, 8, 8), 2, seed=None)
    return splitfed.train(vanilla(model, "relu1"), odd_digits(), rounds=2, optimizer=ADAM, defenses=defenses)


@cache
def more_digits() -> Federation:
    """Real digits of one client, 40 of them victims."""
    return splitfed.data.digits().clients(1, auxiliary=400, victims=40)


@cache
def classes_run(*defenses: Defense, decay: float = 0.0) -> Run:
    """A perceptron on digits; with much `decay` of its weights it learns nothing."""
    with stream(0):
        model = mlp((1, 8, 8), 10, (64,), seed=None)
    return splitfed.train(
        vanilla(model, "relu1"),
        more_digits(),
        rounds=6,
        optimizer=Optim("Adam", {"lr": 3e-3, "weight_decay": decay}),
        defenses=defenses,
        evaluation=splitfed.Evaluation(every=6),
    )


def network(convolutional: bool = False) -> nn.Module:
    """Sigmoids, as in the papers; convolutions start wide, as in DLG, so that their gradients say something."""
    with stream(0):
        if not convolutional:
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))
        model = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(192, 10))
        for weight in model.parameters():
            nn.init.uniform_(weight, -0.5, 0.5)
        return model


def whole(model: nn.Module) -> Topology:
    """Federated averaging of a model that nobody cut."""
    segment = Segment("model", "client", model, ("x",), ("out",))
    return Topology("whole", (segment,), {"x": "client"}, (Head("out", "client", "client"),))


def perceptron() -> Topology:
    """A whole perceptron at every client."""
    return whole(network())


def sgd(**options: Any) -> Optim:
    """Plain SGD at a rate of a tenth."""
    return Optim("SGD", {"lr": 0.1, **options})


RUNS: dict[str, Run] = {}


def fed_run(make: Callable[[], Topology] | None = None, batch: int = 1, rounds: int = 1, **changes: Any) -> Run:
    """Three clients with one batch each, trained once for all calls, the aggregation server recorded."""
    key = repr((make, batch, rounds, changes))
    if key not in RUNS:
        data = splitfed.data.digits().rows(range(3 * batch + 40))
        clients = data.clients(3, auxiliary=30, victims=10, validation=0.0, test=0.0)
        settings = {
            "schedule": "splitfed_v1",
            "optimizer": sgd(),
            "logging": splitfed.Logging(record=Recording(("fed_server",))),
            **changes,
        }
        size = settings.pop("batch_size", batch)
        RUNS[key] = splitfed.train((make or perceptron)(), clients, rounds=rounds, batch_size=size, **settings)
    return RUNS[key]


PULLED = FedProto(weight=1.0)


def _class_means_sent(
    model: nn.Module, data: Federation, rounds: int, method: FedProto | FedDistill, defenses: tuple[Defense, ...]
) -> Run:
    """Whole models that send class means of what follows `relu2` to a recorded fed server."""
    return splitfed.train(
        local(model, ("relu2",)),
        data,
        schedule="independent",
        method=method,
        rounds=rounds,
        batch_size=20,
        optimizer=ADAM,
        defenses=defenses,
        evaluation=splitfed.Evaluation(every=rounds),
        logging=splitfed.Logging(record=Recording((FED,))),
    )


@cache
def proto_run(*defenses: Defense, method: FedProto | FedDistill = PULLED, classes: int = 5) -> Run:
    """Five clients, whole perceptrons on digits of a few classes each; the aggregation server records class means."""
    with stream(0):
        model = mlp((1, 8, 8), 10, (48, 24), seed=None)
    data = splitfed.data.digits().clients(5, classes_per_client=classes, auxiliary=200, victims=20, validation=0.0)
    return _class_means_sent(model, data, 4, method, defenses)


@cache
def noted_by_heart(*defenses: Defense) -> Run:
    """Three clients that learn 70 rows each by heart, half of the labels drawn at random, and send class means."""
    drawn = generator(1, "membership")
    every = splitfed.data.digits()
    some = every.rows(torch.randperm(len(every), generator=drawn)[:410])
    wrong = torch.rand(len(some), generator=drawn) < 0.5
    y = torch.where(wrong, torch.randint(0, 10, (len(some),), generator=drawn), some.y)
    data = Dataset("digits", some.x, y, some.task, some.value_range)
    with stream(0):
        model = mlp((1, 8, 8), 10, (64, 32), seed=None)
    clients = data.clients(3, auxiliary=100, victims=100, validation=0.0, test=0.0)
    return _class_means_sent(model, clients, 40, PULLED, defenses)
