"""What draws from torch's default generator outside of a forward pass repeats with the seed of the run, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.data import from_arrays
from splitfed.topologies import vanilla
from tests.examples import assert_same


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.01 * torch.randn_like(gradient)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind
        if kind == "hook":
            self.b.register_full_backward_hook(lambda module, given, _: (given[0] + 0.01 * torch.randn_like(given[0]),))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(NoisyGradient.apply(h) if self.kind == "function" else h)  # type: ignore[no-any-return]


class Langevin(torch.optim.SGD):
    """Steps with noise."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.add_(torch.randn_like(weight), alpha=0.01)


def noisy_loss(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output + 0.1 * torch.randn_like(output), y)


def trained(kind: str, before: int, rounds: int, folder: Path | None = None) -> sf.Run:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 6, generator=random), torch.randint(3, (60,), generator=random)
    task = sf.classification(3).with_loss(noisy_loss) if kind == "loss" else sf.classification(3)
    data = from_arrays(x, y, task=task).clients(2, auxiliary=4, victims=4)
    torch.manual_seed(0)
    topology = vanilla(Net(kind), "a", task=task, example=x[:8])
    torch.manual_seed(before)
    optimizer = sf.Optim(Langevin if kind == "optimizer" else "SGD", {"lr": 0.05})
    logging = sf.Logging(folder, resume=folder is not None and folder.exists())
    return sf.train(topology, data, rounds=rounds, batch_size=16, optimizer=optimizer, seed=0, logging=logging)


@pytest.mark.parametrize("kind", ["hook", "function", "optimizer", "loss"])
def test_the_same_seed_is_the_same_run_whatever_drew_before_and_in_parts_too(kind: str, tmp_path: Path) -> None:
    expected = trained(kind, 1, 3).state_dict(0)
    assert_same(trained(kind, 2, 3).state_dict(0), expected)
    parts = trained(kind, 3, 1, tmp_path / "run")
    torch.randn(5)
    parts.continue_training(2)
    assert_same(parts.state_dict(0), expected)
