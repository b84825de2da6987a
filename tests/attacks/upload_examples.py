"""Worlds in which clients exchange a model, an adapter or soft labels with a recorded aggregation server."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.defense import Defense
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import classification
from splitfed.data.dataset import ClientData, Dataset, Federation
from splitfed.engines.base import FED
from splitfed.federated import FedMD, Method
from splitfed.models.mlp import mlp
from splitfed.poisoning.byzantine_noise import ByzantineNoise
from splitfed.topologies import local
from splitfed.training.run import Run
from splitfed.training.settings import Adversaries
from tests.attacks.examples import ADAM, sgd

SENT = splitfed.Logging(record=Recording((FED,)))
CELLS, CLASSES = 40, 4


@cache
def exchanged(
    method: Method,
    classes: int = 2,
    rounds: int = 4,
    noise: float = 0.0,
    public: float = 0.0,
    defenses: tuple[Defense, ...] = (),
) -> Run:
    """Five clients, whole perceptrons on digits of a few classes each; `noise`: in place of what they send."""
    with stream(0):
        model = mlp((1, 8, 8), 10, (48, 24), seed=None)
    data = splitfed.data.digits().clients(
        5, classes_per_client=classes, auxiliary=200, victims=20, validation=0.0, public=public
    )
    poisoning = ByzantineNoise(clients=tuple(range(5)), scale=noise) if noise else ()
    return splitfed.train(
        local(model, ("relu2",)),
        data,
        schedule="independent",
        method=method,
        rounds=rounds,
        batch_size=20,
        optimizer=ADAM,
        defenses=defenses,
        adversaries=Adversaries(poisoning=poisoning),
        evaluation=splitfed.Evaluation(every=rounds),
        logging=SENT,
    )


@cache
def exchanged_by_heart(method: Method, noise: float = 0.0) -> Run:
    """Three clients with 70 digits each, half of the labels drawn at random; 100 rows that nobody trained on."""
    drawn = generator(1, "membership")
    every = splitfed.data.digits()
    some = every.rows(torch.randperm(len(every), generator=drawn)[:410])
    wrong = torch.rand(len(some), generator=drawn) < 0.5
    y = torch.where(wrong, torch.randint(0, 10, (len(some),), generator=drawn), some.y)
    data = Dataset("digits", some.x, y, some.task, some.value_range)
    with stream(0):
        model = mlp((1, 8, 8), 10, (64, 32), seed=None)
    poisoning = ByzantineNoise(clients=(0, 1, 2), scale=noise) if noise else ()
    return splitfed.train(
        local(model, ("relu2",)),
        data.clients(3, auxiliary=100, victims=100, validation=0.0, test=0.0),
        schedule="independent",
        method=method,
        rounds=10,
        local=splitfed.LocalUpdate(local_epochs=4),
        batch_size=20,
        optimizer=ADAM,
        adversaries=Adversaries(poisoning=poisoning),
        evaluation=splitfed.Evaluation(every=10),
        logging=SENT,
    )


def cell_rows(cells: Tensor, random: torch.Generator) -> Dataset:
    """A row for each of `cells`, in which that column is near one; its class is drawn at random."""
    x = torch.eye(CELLS)[cells] + 0.05 * torch.randn(len(cells), CELLS, generator=random)
    return Dataset("cells", x, torch.randint(CLASSES, (len(cells),), generator=random), classification(CLASSES))


def cells_federation() -> Federation:
    """Three clients with a row in every cell, whose class each has drawn for itself; the last two show theirs."""
    random = generator(3, "cells")
    parts = []
    for i, shown in enumerate((1, CELLS, CELLS)):
        rows = cell_rows(torch.arange(CELLS).repeat(1 if i == 0 else 2), random)
        parts.append(ClientData(f"client{i}", rows, rows.rows([]), rows.rows([]), torch.arange(shown)))
    auxiliary, victims = (cell_rows(torch.randint(CELLS, (n,), generator=random), random) for n in (60, 160))
    return Federation("cells", classification(CLASSES), tuple(parts), auxiliary, victims, {})


@cache
def cells_run(*defenses: Defense, method: Method | None = None) -> Run:
    """They learn their classes by heart, and score each other's public rows."""
    with stream(0):
        model = nn.Sequential(OrderedDict(fc1=nn.Linear(CELLS, 32), act=nn.ReLU(), fc2=nn.Linear(32, CLASSES)))
    return splitfed.train(
        local(model),
        cells_federation(),
        schedule="independent",
        method=method or FedMD(transfer=0),
        rounds=4,
        local=splitfed.LocalUpdate(local_epochs=30),
        batch_size=20,
        optimizer=Optim("Adam", {"lr": 3e-3}),
        defenses=defenses,
        logging=SENT,
    )


def sigmoid_network() -> nn.Module:
    """A perceptron with a hidden layer of sigmoids, which is where an adapter ends."""
    with stream(0):
        return nn.Sequential(
            OrderedDict(flat=nn.Flatten(), fc1=nn.Linear(64, 32), act=nn.Sigmoid(), fc2=nn.Linear(32, 10))
        )


@cache
def one_step(method: Method, **options: Any) -> Run:
    """Three clients that take one step of plain SGD on one digit each."""
    data = splitfed.data.digits().rows(range(43))
    return splitfed.train(
        local(sigmoid_network(), ("act",)),
        data.clients(3, auxiliary=30, victims=10, validation=0.0, test=0.0),
        schedule="independent",
        method=method,
        rounds=1,
        batch_size=1,
        optimizer=sgd(**options),
        logging=SENT,
    )
