"""Ratios of private step times: dp_sgd over a split model against Opacus on the uncut one, alternately in one process.

Batch 64, SGD, the small network of experiments.benchmarks.steps, clipping by the joint norm, noise multiplier 1.
Opacus: its GradSampleModule and DPOptimizer as they come, the usual loop around them.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.benchmarks.steps import BATCH, OPTIM, ROWS, Net, alternate, split
from splitfed.core.random import generator
from splitfed.defenses import DpSgd
from splitfed.topologies import u_shaped, vanilla


def opacus(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[list[Tensor]], None]:
    """The uncut model under Opacus."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        OPTIM.build(model.parameters())[0], noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH
    )

    def steps(batches: list[Tensor]) -> None:
        for rows in batches:
            loss = functional.cross_entropy(wrapped(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    return steps


def ratios(instances: int, repeats: int, steps: int = 5) -> dict[str, float]:
    """Return each variant's step time over that of Opacus: the median over instances of their medians."""
    found: dict[str, list[float]] = {}
    for instance in range(instances):
        for name, ratio in alternate(_variants(instance, steps), repeats).items():
            found.setdefault(name, []).append(ratio)
    return {name: statistics.median(values) for name, values in found.items() if name != "opacus"}


def _variants(seed: int, steps: int) -> dict[str, Callable[[], None]]:
    drawn = generator(seed, "bench")
    x, y = torch.rand(ROWS, 1, 28, 28, generator=drawn), torch.randint(0, 10, (ROWS,), generator=drawn)
    batches = list(torch.randperm(ROWS, generator=drawn).split(BATCH))[:steps]
    model, joint = Net(), (DpSgd(noise_multiplier=1.0, clip="joint"),)
    loops = {
        "opacus": lambda: opacus(copy.deepcopy(model), x, y),
        "one cut, joint": lambda: split(vanilla(model, "pool1"), x, y, joint),
        "one cut, by party": lambda: split(vanilla(model, "pool1"), x, y, (DpSgd(noise_multiplier=1.0),)),
        "two cuts, joint": lambda: split(u_shaped(model, ("pool1", "fc1")), x, y, joint),
    }
    built = {name: loops[name]() for name in random.Random(seed).sample(list(loops), len(loops))}
    return {name: partial(built[name], batches) for name in loops}


def main() -> None:
    """Print every ratio with the bound it is held to."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    instances, repeats = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (5, 9)
    for name, ratio in ratios(instances, repeats).items():
        print(f"  {name:<18} {ratio:.3f} x Opacus uncut (bound 1.10)")


if __name__ == "__main__":
    main()
