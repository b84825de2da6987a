"""Cut models and the same models uncut, trained by a plain loop over the same batches, for tests of training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset
from splitfed.data.features import feed
from splitfed.schedules.base import Training
from splitfed.topologies import Fusion, u_shaped, vanilla, vertical
from tests.examples import Whole, block, toy_data

SIZE, SEED = 8, 3


class Decay(torch.optim.Optimizer):
    """One's own: SGD at a rate that falls with the steps of each weight, kept in the state."""

    def __init__(self, params: Any, lr: float = 0.1, fall: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "fall": fall})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of lr / (1 + fall x steps)."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    taken = self.state[weight].setdefault("taken", torch.zeros(()))
                    weight.sub_(weight.grad * (group["lr"] / (1 + group["fall"] * float(taken))))
                    taken += 1


def make_decay(params: Any, rate: float) -> torch.optim.Optimizer:
    """One's own, made by a function."""
    return Decay(params, rate, 0.5)


class Tied(nn.Module):
    """The client of a U-shape holds the same matrix at both ends; the layer between is the server's."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.first, self.act = nn.Flatten(), nn.Linear(64, 64), nn.ReLU()
        self.middle, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.middle(self.act(self.first(self.flat(x))))))


def net() -> nn.Module:
    with stream(0):
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU()),
            *(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10)),
        )


def tied() -> nn.Module:
    with stream(0):
        return Tied()


def halves() -> nn.Module:
    bottoms = {"left": block(32, 6), "right": block(32, 6, 1)}
    with stream(0):
        return Whole(bottoms, Fusion("concat"), top=nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10)))


def of_halves(model: Any) -> Topology:
    """The vertical topology of `Whole`, whose parties hold one half of each image."""
    return vertical(dict(model.bottoms), model.top, labels="right", fusion="concat")


CUTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Topology], str]] = {
    "vanilla": (net, lambda m: vanilla(m, "3"), "sequential"),
    "u_shaped": (net, lambda m: u_shaped(m, ("3", "5")), "sequential"),
    "tied u_shaped": (tied, lambda m: u_shaped(m, ("act", "middle")), "sequential"),
    "vertical": (halves, of_halves, "joint"),
}


def rows_of(cut: str, count: int = 64) -> Dataset:
    """Images, for the vertical topology divided in flattened halves."""
    data = toy_data(count)
    if cut != "vertical":
        return data
    flat = sf.data.from_arrays(data.x.flatten(1), data.y, task=sf.classification(10), name="toy")
    return flat.vertical({"left": range(32), "right": range(32, 64)})


def train_cut(cut: str, optimizer: Any, rounds: int = 2, task: sf.Task | None = None, **changes: Any) -> sf.Run:
    """Train the model `cut` in `rounds` rounds, on one client."""
    make, topology, schedule = CUTS[cut]
    data = rows_of(cut)
    if task is not None:
        data = sf.data.from_arrays(data.x, data.y, task=task, name="toy")
    federation = data.clients(1, auxiliary=4, victims=4, seed=0)
    settings = {"schedule": schedule, "batch_size": SIZE, "seed": SEED, **changes}
    return sf.train(topology(make()), federation, rounds=rounds, optimizer=optimizer, **settings)


def train_uncut(
    cut: str,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    rows: Dataset,
    training: Training,
    rounds: int = 2,
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> dict[str, Tensor]:
    """Train the same model as anybody would, with one optimizer; a step behind `training.accumulate` batches."""
    model = copy.deepcopy(CUTS[cut][0]()).train()
    steps = optimizer(model)
    schedule = None if scheduler is None else scheduler(steps)
    names = ("left", "right") if cut == "vertical" else ()
    for epoch in range(rounds):
        batches = training.batches(len(rows), epoch, 0)
        for start in range(0, len(batches), training.accumulate):
            group: Sequence[Tensor] = batches[start : start + training.accumulate]
            steps.zero_grad()
            for batch in group:
                x: Any = rows.x[batch]
                if names:
                    found: Mapping[str, Tensor] = feed(x, dict.fromkeys(names, ""), rows.features)
                    x = found
                (loss(model(x), rows.y[batch]) / len(group)).backward()
            steps.step()
            if schedule is not None:
                schedule.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def weights_of(run: sf.Run) -> dict[str, Tensor]:
    """The whole model of the run's client, named as the uncut one."""
    return run.engine.topologies[0].state_dict(run.engine.modules(0))
