"""Worlds for every attack on what a method's clients upload: one where it must succeed, and one where it cannot.

The planted worlds: rows of nothing but noise, which a model can only learn by heart (who was trained on?); rows that
show their class clearly, of few classes a client (which classes, and what do they look like?); rows in cells, of which
each client shows one and keeps one, with labels of their own (who was trained on, by scores of the rows that are
shown?); and a single step on a single row. All rows are drawn from a distribution, so that there are as many as one
likes which nobody trained on.

The hopeless worlds are the same runs with the same uploads, about somebody else: the evaluator is asked about clients
whose rows were drawn afresh, of the same classes or of classes of their own, or about classes that are called by other
names than those trained on. What was uploaded does not depend on these, so nothing of them can be found in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.local_update import LocalUpdate
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.data.dataset import ClientData, Dataset, Federation
from splitfed.engines.base import FED
from splitfed.models.mlp import mlp
from splitfed.registry import load
from splitfed.threats.evaluator import Evaluator
from splitfed.topologies import local
from splitfed.training.run import Run
from tests.attacks.examples import sgd
from tests.attacks.upload_examples import sigmoid_network

CLIENTS, CLASSES, HELD, ROWS, SHOWN = 4, 10, 4, 40, 20
SKEWED_CLIENTS = 8
CELLS, LABELS = 40, 4
RANGE = (-1.0, 1.0)
RECORDED = splitfed.Logging(record=Recording((FED,)))
SCORED = ("fedmd", "mafml")
"""The methods whose clients score public rows; their models are never sent."""

Draw = Callable[[Tensor, torch.Generator], Dataset]
"""From a kind for every row, (rows,) int64, to these rows."""


def pattern_rows(y: Tensor, random: torch.Generator) -> Dataset:
    """Return images that show their class in the upper half; the lower half is noise."""
    shapes = torch.randint(2, (CLASSES, 1, 4, 8), generator=generator(11, "patterns")).float()
    x = torch.cat([shapes[y], torch.rand(len(y), 1, 4, 8, generator=random)], 2)
    return Dataset("patterns", 2 * x - 1, y, classification(CLASSES), RANGE)


def noise_rows(y: Tensor, random: torch.Generator) -> Dataset:
    """Return images in black and white that say nothing of their class."""
    x = torch.randint(2, (len(y), 1, 8, 8), generator=random).float()
    return Dataset("noise", 2 * x - 1, y, classification(CLASSES), RANGE)


def grey_rows(y: Tensor, random: torch.Generator) -> Dataset:
    """Return images in shades of grey that say nothing of their class."""
    return Dataset("grey", torch.rand(len(y), 1, 8, 8, generator=random), y, classification(CLASSES), (0.0, 1.0))


def cell_rows(cells: Tensor, random: torch.Generator) -> Dataset:
    """Return a row for each of `cells`, in which that column is near one; its class is drawn at random."""
    x = torch.eye(CELLS)[cells] + 0.02 * torch.randn(len(cells), CELLS, generator=random)
    return Dataset("cells", x, torch.randint(LABELS, (len(cells),), generator=random), classification(LABELS))


DRAWS: dict[str, Draw] = {"patterns": pattern_rows, "noise": noise_rows, "grey": grey_rows, "cells": cell_rows}


def held_labels(rows: int, random: torch.Generator) -> Tensor:
    """Return classes of a client's rows: each of `HELD` at least once, in shares drawn at random."""
    held = torch.randperm(CLASSES, generator=random)[:HELD]
    weights = torch.rand(HELD, generator=random) + 0.2
    return torch.cat([held, held[torch.multinomial(weights, rows - HELD, replacement=True, generator=random)]])


def federation(draw: Draw, parts: list[Tensor], others: int, victims: int, shown: int, seed: int) -> Federation:
    """Return clients with rows drawn for `parts`, of which they show the first, and others drawn for kinds in turn."""
    random = generator(seed, "upload worlds")
    rows = [draw(part, random) for part in parts]
    clients = [ClientData(f"client{i}", r, r.rows([]), r.rows([]), torch.arange(shown)) for i, r in enumerate(rows)]
    unseen = [draw(torch.arange(count) % others, random) for count in (200, victims)]
    return Federation(rows[0].name, rows[0].task, tuple(clients), *unseen, {})


def of_few_classes(draw: Draw, clients: int, shown: int, seed: int) -> Federation:
    """Return clients with rows of a few classes each; 400 victims of all classes."""
    random = generator(seed, "classes")
    return federation(draw, [held_labels(ROWS + shown, random) for _ in range(clients)], CLASSES, 400, shown, seed)


@cache
def memorised(name: str, seed: int = 0) -> Run:
    """Clients of method `name` that have learnt rows of noise by heart."""
    if name in SCORED:
        with stream(seed):
            layers = OrderedDict(fc1=nn.Linear(CELLS, 32), act=nn.ReLU(), fc2=nn.Linear(32, LABELS))
        data = federation(cell_rows, [torch.arange(CELLS).repeat(2)] * CLIENTS, CELLS, 5 * CELLS, CELLS, seed)
        return _train(name, local(nn.Sequential(layers)), data, 2, 10, Optim("Adam", {"lr": 0.01}))
    # Clients of FedSGD take no steps of their own; those of pFedMe refuse rates from 1 / 15 on.
    rounds, epochs, rate = {"fedsgd": (100, 1, 0.3), "pfedme": (2, 20, 0.05)}.get(name, (2, 20, 0.1))
    return _train(name, _perceptron(seed), of_few_classes(noise_rows, CLIENTS, 0, seed), rounds, epochs, sgd(lr=rate))


@cache
def skewed(name: str, seed: int = 0) -> Run:
    """Clients of method `name` that have learnt clear rows of a few classes each, and little more."""
    rounds, epochs, rate = (30, 1, 0.5) if name == "fedsgd" else (2, 10, 0.05)
    if name in SCORED:
        # Scores of rows that nobody has trained on for long lean towards the client's classes only a little.
        epochs, rate = 20, 0.1
    shown = SHOWN if name in SCORED else 0
    return _train(
        name, _perceptron(seed), of_few_classes(pattern_rows, SKEWED_CLIENTS, shown, seed), rounds, epochs, sgd(lr=rate)
    )


@cache
def stepped(name: str, seed: int = 0) -> Run:
    """Clients of method `name` that have taken one step of plain SGD on one clear row each."""
    parts = list(torch.randperm(CLASSES, generator=generator(seed, "one step"))[:CLIENTS].split(1))
    data = federation(grey_rows, parts, CLASSES, 100, 0, seed)
    return _train(name, local(sigmoid_network(), ("act",)), data, 1, 1, sgd())


def _perceptron(seed: int) -> Topology:
    with stream(seed):
        return local(mlp((1, 8, 8), CLASSES, (64, 32), seed=None), ("relu2",))


def _train(name: str, topology: Topology, data: Federation, rounds: int, epochs: int, optimizer: Optim) -> Run:
    return splitfed.train(
        topology,
        data,
        schedule="independent",
        method=load("methods", name)(),
        rounds=rounds,
        local=LocalUpdate(local_epochs=epochs),
        batch_size=20,
        optimizer=optimizer,
        evaluation=splitfed.Evaluation(every=rounds),
        logging=RECORDED,
    )


def about(run: Run, data: Federation) -> Evaluator:
    """Return what questions the uploads of `run` about the clients of `data`, on which it was not trained."""
    return Evaluator(replace(run.evaluator.grants, data=data))


def strangers(data: Federation, seed: int, same_classes: bool = True) -> Federation:
    """Return `data` with fresh rows for every client, as many, of the same classes or of classes drawn anew."""
    random = generator(seed, "strangers")

    def fresh(rows: Dataset) -> Dataset:
        kinds = rows.x.argmax(1) if rows.name == "cells" else rows.y
        y = kinds if same_classes else held_labels(len(rows), random)
        return DRAWS[rows.name](y, random)

    return _with_rows(data, fresh)


def renamed(data: Federation, seed: int) -> Federation:
    """Return `data` with every class called by the name of another, drawn at random, wherever a row has one."""
    order = torch.randperm(CLASSES, generator=generator(seed, "names"))
    names = torch.empty_like(order).scatter(0, order, order.roll(1))

    def rename(rows: Dataset) -> Dataset:
        return Dataset(rows.name, rows.x, names[rows.y], rows.task, rows.value_range)

    return replace(_with_rows(data, rename), auxiliary=rename(data.auxiliary), victims=rename(data.victims))


def _with_rows(data: Federation, change: Callable[[Dataset], Dataset]) -> Federation:
    return replace(data, clients=tuple(replace(c, train=change(c.train)) for c in data.clients))
