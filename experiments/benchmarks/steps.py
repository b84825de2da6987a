"""Ratios of step times: split against uncut, by hand and by splitfed, with a defense, a recorder; of import times.

What is compared runs alternately in one process, so that a slow moment of the machine hits both; each ratio is
the median over pairs. Batch 64, SGD, two networks: conv16-conv32-fc128-fc10 on 28x28 images, whose step is so short
that a fixed cost a message shows, and ResNet-8 on 32x32 images in colour.
"""

from __future__ import annotations

import copy
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.cut_names import read_cuts
from splitfed.core.cutting import cut
from splitfed.core.defense import Defense
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator
from splitfed.core.replay import replay
from splitfed.core.tasks import classification
from splitfed.core.topology import Head, Segment, Topology
from splitfed.defenses import DistanceCorrelation
from splitfed.engines.local import LocalEngine
from splitfed.models.resnet8 import resnet8
from splitfed.topologies import u_shaped, vanilla

ROWS, BATCH = 640, 64
RATE = 0.01
OPTIM = Optim("SGD", {"lr": RATE})


class Net(nn.Module):
    """conv16-conv32-fc128-fc10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.flat = nn.Flatten()
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool2(self.relu2(self.conv2(self.pool1(self.relu1(self.conv1(x))))))
        return self.fc2(self.relu3(self.fc1(self.flat(h))))


@dataclass(frozen=True)
class Workload:
    """A network, the shape of a row, where one and two cuts go, and how often it is measured."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    cuts: tuple[str, str]
    steps: int
    instances: int
    repeats: int


WORKLOADS = (
    Workload("small CNN, 28x28", Net, (1, 28, 28), ("pool1", "fc1"), 5, 15, 15),
    Workload("ResNet-8, 3x32x32", lambda: resnet8((3, 32, 32), 10), (3, 32, 32), ("stage1", "stage3"), 2, 5, 11),
)


def uncut(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[list[Tensor]], None]:
    """The bare loop, as anybody would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def steps(batches: list[Tensor]) -> None:
        for rows in batches:
            loss = functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss.item()

    return steps


def by_hand(model: nn.Module, at: str, x: Tensor, y: Tensor) -> Callable[[list[Tensor]], None]:
    """One cut as anybody would write it without a library: two modules, two optimizers, one detach."""
    bottom, top = (piece.module for piece in cut(model, (at,)))
    optimizers = [torch.optim.SGD(part.parameters(), lr=RATE) for part in (bottom, top)]

    def steps(batches: list[Tensor]) -> None:
        for rows in batches:
            z = bottom(x[rows])
            leaf = z.detach().requires_grad_()
            loss = functional.cross_entropy(top(leaf), y[rows])
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            z.backward(leaf.grad)
            for optimizer in optimizers:
                optimizer.step()
            loss.item()

    return steps


def split(
    topology: Topology, x: Tensor, y: Tensor, defenses: tuple[Defense, ...] = (), record: Recording | None = None
) -> Callable[[list[Tensor]], None]:
    """The same steps through parties."""
    ready = topology.with_task(classification(10))
    (name,) = ready.inputs
    facts = pass_example(ready, {name: x[:4]})
    optims = dict.fromkeys(ready.roles, OPTIM)
    engine = LocalEngine(ready, facts, 1, defenses=defenses, optims=optims, recording=record)
    engine.own(0, "train", {name: x}, {h.value: y for h in ready.heads})
    return lambda batches: _spent(engine, batches)


def replayed(model: nn.Module, cuts: tuple[str, ...], x: Tensor) -> Topology:
    """The topology of `vanilla`, or of `u_shaped` for two cuts, of segments that replay `forward`."""
    found = replay(model, read_cuts(model, cuts), x[:8])
    names, roles = ("bottom", "middle", "head"), ("client", "server", "client")
    segments = tuple(Segment(n, role, *piece) for n, role, piece in zip(names, roles, found.segments, strict=False))
    return Topology(
        "replayed", segments, {found.inputs[0]: "client"}, (Head(found.outputs[0], roles[len(cuts)], "client"),)
    )


def _spent(engine: LocalEngine, batches: list[Tensor]) -> None:
    engine.train(0, 0, batches)
    for recorder in engine.link.recorders.values():
        # Let go of what was kept, as a recorder that spills to disk would; memory must not grow over the repeats.
        recorder.load_state({"parts": 0, "digests": []})


def alternate(runners: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Run all in turn, `repeats` times; return each one's median time over that of the first, pair by pair."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for runner in runners.values():
        runner()
    shuffle = random.Random(0).sample
    for _ in range(repeats):
        # In a new order each time: what ran before leaves its traces in the caches.
        for name in shuffle(list(runners), len(runners)):
            started = time.perf_counter()
            runners[name]()
            times[name].append(time.perf_counter() - started)
    base = times[next(iter(runners))]
    pairs = {name: [own / other for own, other in zip(spent, base, strict=True)] for name, spent in times.items()}
    return {name: statistics.median(ratios) for name, ratios in pairs.items()}


def step_ratios(work: Workload) -> dict[str, float]:
    """Return each variant's step time over that of the uncut model: the median over instances of their medians.

    Every variant is built anew several times: where its tensors come to lie in memory alone makes two equal
    loops differ by some per cent for as long as they live.
    """
    found: dict[str, list[float]] = {}
    for instance in range(work.instances):
        for name, ratio in alternate(_variants(work, instance), work.repeats).items():
            found.setdefault(name, []).append(ratio)
    return {name: statistics.median(ratios) for name, ratios in found.items() if name != "uncut"}


def _variants(work: Workload, seed: int) -> dict[str, Callable[[], None]]:
    drawn = generator(seed, "bench")
    x, y = torch.rand(ROWS, *work.shape, generator=drawn), torch.randint(0, 10, (ROWS,), generator=drawn)
    batches = list(torch.randperm(ROWS, generator=drawn).split(BATCH))[: work.steps]
    model, (first, second) = work.model(), work.cuts
    loops = {
        "uncut": lambda: uncut(copy.deepcopy(model), x, y),
        "by hand": lambda: by_hand(copy.deepcopy(model), first, x, y),
        "one cut": lambda: split(vanilla(model, first), x, y),
        "two cuts": lambda: split(u_shaped(model, (first, second)), x, y),
        "one, replayed": lambda: split(replayed(model, (first,), x), x, y),
        "two, replayed": lambda: split(replayed(model, (first, second), x), x, y),
        "NoPeek": lambda: split(vanilla(model, first), x, y, (DistanceCorrelation(0.5),)),
        "NoPeek, later": lambda: split(vanilla(model, second), x, y, (DistanceCorrelation(0.5),)),
        "recorder on": lambda: split(vanilla(model, first), x, y, record=Recording(("server",))),
    }
    # Built in another order each time, so that none always gets the memory that is left over. The uncut loop stays
    # the first of the result: the others are compared with it.
    built = {name: loops[name]() for name in random.Random(seed).sample(list(loops), len(loops))}
    return {name: partial(built[name], batches) for name in loops}


def import_ratio(repeats: int = 7) -> float:
    """Return the median time of a process that imports splitfed and torch over one that imports torch."""

    def process(code: str) -> Callable[[], None]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, cwd=Path.home()) and None

    ratios = alternate({"torch": process("import torch"), "splitfed": process("import splitfed, torch")}, repeats)
    return ratios["splitfed"]


def keep_memory(module: str = "experiments.benchmarks.steps") -> None:
    """Start this process, which runs `module`, again with an allocator that keeps what it was given.

    By default it returns large blocks to the system and fetches them back, hundreds of page faults a step, or not,
    by the chance of how blocks happen to lie; that noise is several times what is measured here.
    """
    settings = {
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**28),
    }
    if any(name not in os.environ for name in settings):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | settings)


def main() -> None:
    """Print every ratio with the bound it is held to; bounds are of one thread, two threads are for comparison."""
    keep_memory()
    bounds = {"one cut": 1.02, "two cuts": 1.03, "NoPeek": 1.10, "NoPeek, later": 1.10, "recorder on": 1.10}
    for threads, work in ((1, WORKLOADS[0]), (1, WORKLOADS[1]), (2, WORKLOADS[0])):
        torch.set_num_threads(threads)
        print(f"{work.name}, {threads} thread(s)")
        for name, ratio in step_ratios(work).items():
            bound = f" (bound {bounds[name]:.2f})" if name in bounds and threads == 1 else ""
            print(f"  {name:<13} {ratio:.3f} x uncut{bound}")
    print(f"import splitfed, torch: {import_ratio():.3f} x import torch (bound 1.20)")


if __name__ == "__main__":
    main()
