"""What comes on top of training: `sf.train` over a bare loop, a study over the calls it makes, two workers over one.

`python -m tests.benchmarks.overhead [training] [round] [study] [workers]`, all of them by default. Ratios of `training`,
`round` and `study` are of the CPU time of one thread; both sides take turns in one process. That of `workers` is of the
clock on the wall, and says something on an idle machine alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

import splitfed as sf
from splitfed.data.federation import Federation
from splitfed.models import lenet

LONG, BATCH, PREDICTED = 45, 64, 256
"""Rounds that take more than ten seconds; rows in a batch, and in one of an evaluation."""

RATE, MOMENTUM = 0.05, 0.9


def mnist() -> Federation:
    """Return MNIST-5k for one client, whose training, validation and test rows are drawn by the seed."""
    return sf.data.mnist5k().clients(1, seed=0)


def train_split(data: Federation, rounds: int) -> sf.Run:
    """Train LeNet, cut after its first pooling, with a score of the validation and the test rows in every round."""
    optimizer = sf.Optim("SGD", {"lr": RATE, "momentum": MOMENTUM})
    topology = sf.topologies.vanilla(lenet((1, 28, 28), 10, seed=0), "pool1")
    return sf.train(topology, data, rounds=rounds, batch_size=BATCH, optimizer=optimizer, seed=0)


def train_bare(data: Federation, rounds: int) -> list[list[float]]:
    """Train the uncut model as anybody would write it; return the two accuracies of every round."""
    client, model = data.clients[0], lenet((1, 28, 28), 10, seed=0)
    x, y = client.train.x, client.train.y
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    order, history = torch.Generator().manual_seed(0), []
    for _ in range(rounds):
        model.train()
        for rows in torch.randperm(len(x), generator=order).split(BATCH):
            loss = functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss.item()
        model.eval()
        history.append([_accuracy(model, part) for part in (client.validation, client.test)])
    return history


@torch.no_grad()
def _accuracy(model: torch.nn.Module, part: sf.Dataset) -> float:
    outputs = torch.cat([model(x) for x in part.x.split(PREDICTED)])
    return float((outputs.argmax(1) == part.y).double().mean())


def cpu_ratios(ours: Callable[[], object], bare: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Return the CPU seconds of both in turn, `repeats` times, now the one first and now the other; a warm-up before."""
    times: list[tuple[float, float]] = []
    ours()
    bare()
    for i in range(repeats):
        spent = {}
        for runner in (ours, bare) if i % 2 else (bare, ours):
            started = time.process_time()
            runner()
            spent[runner] = time.process_time() - started
        times.append((spent[ours], spent[bare]))
        print(f"  {spent[ours]:.2f} s, {spent[bare]:.2f} s: {spent[ours] / spent[bare]:.3f}", flush=True)
    return times


def tell(name: str, times: list[tuple[float, float]], bound: float | None) -> None:
    """Print the median ratio of `times` with its quartiles, and the aim it is held to."""
    ratios = [ours / bare for ours, bare in times]
    low, middle, high = statistics.quantiles(ratios, n=4)
    base = statistics.median(bare for _, bare in times)
    aim = "" if bound is None else f"; aim {bound:.2f}"
    print(f"{name}: {middle:.3f} ({low:.3f} to {high:.3f} for the middle half of {len(ratios)}) x {base:.1f} s{aim}")


def measure_training(rounds: int, repeats: int, bound: float | None) -> None:
    """`sf.train`, validation and set-up included, over the bare loop with the same evaluations."""
    data = mnist()
    times = cpu_ratios(lambda: train_split(data, rounds), lambda: train_bare(data, rounds), repeats)
    tell(f"sf.train over a bare loop, {rounds} round(s) of LeNet on MNIST-5k", times, bound)


STUDY = {
    "data": "digits",
    "model": {"name": "lenet"},
    "training": {"rounds": 60, "batch_size": 32},
    "topology": {"name": "vanilla", "cut": "pool1"},
}
ATTACK = {"name": "inverse_network"}


def measure_study(rounds: int, repeats: int) -> None:
    """A study of one run, its folder, checkpoints, result and report, over `sf.train` and `run.attack` alone."""


