"""Ten clients against a thousand: time of a client's step, and memory, each client with 60 rows of MNIST's size.

Both runs live in one process and take turns; a ratio is the median over pairs. Run apart from anything else.
"""

from __future__ import annotations

import statistics
import time

import torch

import splitfed as sf
from splitfed.core.tasks import classification
from splitfed.engines.local import LocalEngine
from splitfed.models.lenet import lenet
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.training.entry_point import engine_of
from splitfed.training.run_plan import RunPlan

ROWS, BATCH, TURNS, REPEATS = 60, 30, 40, 15


def resident() -> float:
    """Return the megabytes this process has in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def engine_with(clients: int, schedule: str) -> LocalEngine:
    """Return an engine whose clients have `ROWS` training rows each."""
    x = torch.rand(clients * ROWS, 1, 28, 28)
    data = sf.Dataset("random", x, torch.arange(len(x)) % 10, classification(10), (0.0, 1.0))
    split = data.clients(clients, auxiliary=0, victims=0, validation=0, test=0)
    topology = sf.topologies.vanilla(lenet((1, 28, 28), 10), "pool1")
    training = Training(BATCH)
    ready = prepare(topology, split, schedule=schedule, defenses=(), optimizer=None, training=training)
    return engine_of(RunPlan(ready, 1))


def spent(engine: LocalEngine, first: int) -> float:
    """Return the seconds a step takes: `TURNS` clients in turn from `first` on, the rest of their rows each."""
    started = time.perf_counter()
    batches = list(torch.arange(ROWS).split(BATCH))
    for turn in range(TURNS):
        engine.train((first + turn) % engine.replicas, 0, batches)
    return (time.perf_counter() - started) / (TURNS * len(batches))


def main() -> None:
    """Print time and memory for schedules with one server segment and with a copy for each client."""
    torch.set_num_threads(1)
    for schedule in ("sequential", "splitfed_v1"):
        before = resident()
        few = engine_with(10, schedule)
        middle = resident()
        many = engine_with(1000, schedule)
        after = resident()
        ratios = []
        spent(few, 0)
        # Every client once beforehand, so that all optimizers have their state.
        for first in range(0, 1000, TURNS):
            spent(many, first)
        trained = resident()
        for repeat in range(REPEATS):
            one, other = spent(few, 0), spent(many, repeat * TURNS)
            ratios.append(other / one)
        data = 1000 * ROWS * 784 * 4 / 2**20
        print(
            f"{schedule}: a step among 1000 clients takes {statistics.median(ratios):.3f} x one among 10 (bound 1.10); "
            f"memory {middle - before:.0f} MB with 10, {after - middle:.0f} MB more with 1000 before training "
            f"({data:.0f} MB of it their data), {trained - middle:.0f} MB after every client has trained"
        )


if __name__ == "__main__":
    main()
