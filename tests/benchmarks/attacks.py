"""Attacks: all victims at once against one after another, and seconds: `python -m tests.benchmarks.attacks`.

MNIST-5k, LeNet cut after its first pooling, 32 victims. Budgets are cut, the same for both sides of a ratio.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

import splitfed as sf
from splitfed.attacks.base import Attack, Knowledge
from splitfed.attacks.inverse_network import InverseNetwork
from splitfed.attacks.rmle import Rmle
from splitfed.attacks.unsplit import Unsplit
from splitfed.models.lenet import lenet
from splitfed.seeding import generator, stream
from splitfed.view import View

VICTIMS, REPEATS = 32, 3


def spent(attack: Attack, views: list[View], knowledge: Knowledge) -> float:
    """Return the seconds that `attack` takes for all `views`, one after another."""
    started = time.perf_counter()
    for view in views:
        attack(view, knowledge, generator(0))
    return time.perf_counter() - started


def apart(view: View) -> list[View]:
    """Return a view for each victim of `view`."""
    (message,) = view.select(kind="activation").messages
    rows = [{name: z[i : i + 1] for name, z in message.tensors.items()} for i in range(VICTIMS)]
    return [View(view.party, (message._replace(tensors=row),), view.segments) for row in rows]


def main() -> None:
    """Print ratios on one thread, then the seconds of `inverse_network` on all cores."""
    data = sf.data.mnist5k().clients(1, auxiliary=1500, victims=VICTIMS)
    with stream(0):
        model = lenet((1, 28, 28), 10)
    run = sf.train(sf.topologies.vanilla(model, "pool1"), data, rounds=1)
    view, knowledge = run.observe(), run.inquiry.knowledge("server", 0, 0)
    torch.set_num_threads(1)
    for attack in (Rmle(iterations=20), Unsplit(rounds=2, input_steps=5, model_steps=5, restarts=1)):
        pairs = [(spent(attack, apart(view), knowledge), spent(attack, [view], knowledge)) for _ in range(REPEATS)]
        ratio = statistics.median(single / together for single, together in pairs)
        print(f"{type(attack).__name__}: {VICTIMS} victims at once are {ratio:.1f}x as fast as one by one")
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    seconds = spent(InverseNetwork.preset("fast"), [view], knowledge)
    print(f"InverseNetwork fast, 1500 auxiliary images of 28x28, {cores} cores: {seconds:.1f} s (at most 20)")


if __name__ == "__main__":
    main()
