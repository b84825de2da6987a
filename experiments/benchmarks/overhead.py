"""What comes on top of training: `sf.train` over a bare loop, a study over the calls it makes, two workers over one.

`python -m experiments.benchmarks.overhead [training] [round] [study] [short] [workers]`, all by default. The ratios of
all but `workers` are of the CPU time of one thread, and both sides take turns in one process. That of `workers` is of
the clock on the wall, and says something on an idle machine alone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import splitfed as sf
from experiments.benchmarks.steps import keep_memory
from splitfed.data.dataset import Federation
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
    """Return the CPU seconds of both in turn, `repeats` times after one that is not counted, each first in turn."""
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


TRAINING = {"rounds": LONG, "batch_size": BATCH, "optimizer": {"name": "SGD", "lr": RATE, "momentum": MOMENTUM}}
TABLES: Mapping[str, Any] = {
    "data": "mnist5k",
    "model": {"name": "lenet"},
    "topology": {"name": "vanilla", "cut": "pool1"},
    "attack": {"name": "inverse_network", "budget": "quick"},
}


def run_one(rounds: int) -> None:
    """Do a study of one run in a new folder, from its tables to its report."""
    with tempfile.TemporaryDirectory() as place:
        study = sf.study("one", training={**TRAINING, "rounds": rounds}, **TABLES)
        study.run(Path(place) / "one").report()


def call_one(rounds: int) -> None:
    """Make the calls that the study makes: data, training, attack, and what a release tells without an attack."""
    run = train_split(mnist(), rounds)
    run.attack("inverse_network", budget="quick")
    run.measure_release()


def measure_study(rounds: int, repeats: int, bound: float | None) -> None:
    """A study of one run, with its checks, folder, checkpoints, result and report, over the calls alone."""
    times = cpu_ratios(lambda: run_one(rounds), lambda: call_one(rounds), repeats)
    tell(f"a study of one run over its calls, {rounds} rounds", times, bound)
    more = statistics.median(ours - bare for ours, bare in times)
    print(f"  {more:.2f} s more a run, or {100 * more / 60:.1f} % of one that takes a minute")


def measure_workers(runs: int, repeats: int, bound: float) -> None:
    """Wall time of a study of `runs` runs of some ten seconds: one worker over two, start of the processes included."""
    study = sf.study(
        "several", seeds=range(runs), training=TRAINING, **{k: TABLES[k] for k in ("data", "model", "topology")}
    )
    ratios = []
    with tempfile.TemporaryDirectory() as place:
        study.save(path := Path(place) / "several.toml")
        for i in range(repeats):
            spent = {}
            for workers in (1, 2) if i % 2 else (2, 1):
                folder = Path(place) / f"{i}-{workers}"
                command = [sys.executable, "-m", "splitfed", "run", str(path), "--folder", str(folder)]
                started = time.perf_counter()
                subprocess.run([*command, "--workers", str(workers)], check=True, stdout=subprocess.DEVNULL)
                spent[workers] = time.perf_counter() - started
            ratios.append(spent[1] / spent[2])
            print(f"  {spent[1]:.1f} s, {spent[2]:.1f} s: {ratios[-1]:.2f}", flush=True)
    print(f"one worker over two, {runs} runs: {statistics.median(ratios):.2f}; aim {bound:.2f}")


MEASURES: Mapping[str, Callable[[], None]] = {
    "training": lambda: measure_training(LONG, 15, 1.05),
    "round": lambda: measure_training(1, 15, None),
    "study": lambda: measure_study(5 * LONG, 5, 1.02),
    "short": lambda: measure_study(4, 15, None),
    "workers": lambda: measure_workers(12, 3, 1.7),
}


def main(names: Sequence[str]) -> None:
    """Print what is asked for, by default all of it."""
    for name in names or MEASURES:
        if name not in MEASURES:
            sys.exit(f"no measurement {name!r}; there are {', '.join(MEASURES)}")
    keep_memory("experiments.benchmarks.overhead")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in names or MEASURES:
        MEASURES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
