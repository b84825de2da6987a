"""A buffer that changes its shape in training: handed over from client to client, and refused where it is averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.data import from_arrays
from splitfed.topologies import vanilla
from tests.examples import assert_same, refusal


class History(nn.Module):
    """Keeps the means of the last batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.h = torch.cat([self.h, x.detach().mean().view(1)])[-50:]
        return x - self.h.mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), History(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 40))


def trained(schedule: str, order: list[Tensor] | None = None, **options: Any) -> sf.Run:
    def loss(output: Tensor, n: Tensor) -> Tensor:
        if output.requires_grad and order is not None:
            order.append(n.clone())
        return nn.functional.cross_entropy(output, n)

    task = sf.classification(40).with_loss(loss)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    # Every row is a class of its own, by which its place is known.
    data = from_arrays(x, torch.arange(40), task=task).clients(2, auxiliary=0, victims=0)
    topology = vanilla(model(), "3", example=x[:8], task=task)
    optimizer = sf.Optim("SGD", {"lr": 0.1})
    return sf.train(topology, data, rounds=2, batch_size=8, seed=0, schedule=schedule, optimizer=optimizer, **options)


@pytest.mark.parametrize("schedule", ["sequential", "alternate"])
def test_it_is_handed_over_as_in_one_loop_over_all_rows(schedule: str) -> None:
    order: list[Tensor] = []
    run = trained(schedule, order)
    steps = sum(entry["steps"] for entry in run.history)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    uncut = model()
    optimizer = torch.optim.SGD(uncut.parameters(), lr=0.1)
    # The first ones are tried out before training.
    for n in order[-steps:]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(uncut(x[n]), n).backward()
        optimizer.step()
    newest = max(range(2), key=lambda client: run.state_dict(client)["1.h"].numel())
    assert run.state_dict(newest)["1.h"].shape == (steps,)
    assert_same(run.state_dict(newest), dict(uncut.state_dict()))


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("splitfed_v1", {}), ("splitfed_v2", {}), ("splitfed_v3", {"method": "fedavg"})],
)
def test_it_is_refused_before_training_where_those_of_several_are_averaged(schedule: str, options: Any) -> None:
    said = refusal(trained, schedule, **options)
    assert "buffer '1.h' of segment 'bottom' changes its shape in training" in said
