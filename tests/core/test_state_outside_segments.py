"""What losses, metrics, optimizers and gradients remember outside of segments: no resume loses it in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.topologies import local
from tests.examples import toy_data


def train(module: nn.Module, folder: Path | None, task: Any = None, optimizer: Any = None, rounds: int = 2) -> sf.Run:
    data = toy_data(60).clients(1, auxiliary=4, victims=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), module, nn.Linear(6, 10))
    return sf.train(
        local(model, task=task), data, rounds=rounds, optimizer=optimizer, logging=sf.Logging(folder=folder)
    )


class Counting:
    """A loss that weighs its steps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(output, y) * (1 + 0.1 * self.calls)


class Averaging(nn.Module):
    """A loss with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.mean: Tensor

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(output, y)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


@pytest.mark.parametrize("kind", [Counting, Averaging])
def test_a_loss_that_remembers_is_refused_at_its_first_checkpoint(kind: type, tmp_path: Path) -> None:
    task = sf.classification(10).with_loss(kind())
    with pytest.raises(InvalidInput, match=r"the loss or the metric of .* is not as it was before training"):
        train(nn.ReLU(), tmp_path / "run", task)
    assert len(train(nn.ReLU(), None, sf.classification(10).with_loss(kind())).history) == 2


def test_a_loss_that_remembers_nothing_is_kept(tmp_path: Path) -> None:
    task = sf.classification(10).with_loss(nn.CrossEntropyLoss(weight=torch.linspace(1, 2, 10)))
    assert len(train(nn.ReLU(), tmp_path / "run", task).history) == 2


class Lookahead(torch.optim.SGD):
    """Slow weights in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.steps
        return super().step(closure)


class Listing(torch.optim.SGD):
    """Weights in an attribute, which is no memory of steps."""

    def __init__(self, params: Any, lr: float) -> None:
        self.mine = list(params)
        super().__init__(self.mine, lr=lr)


def test_an_optimizer_that_remembers_in_attributes_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Lookahead remembers its steps in its attributes"):
        train(nn.ReLU(), tmp_path / "run", optimizer=Optim(Lookahead, {"lr": 0.05}))
    assert len(train(nn.ReLU(), tmp_path / "other", optimizer=Optim(Listing, {"lr": 0.05})).history) == 2


class Prompt(nn.Module):
    """Follows the gradient of a tensor that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.zeros(6, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.a.grad is not None:
            self.a = (self.a - 0.1 * self.a.grad).detach().requires_grad_()
        return x + self.a


def test_a_gradient_that_waits_for_the_next_step_is_refused(tmp_path: Path) -> None:
    with stream(0), pytest.raises(InvalidInput, match=r"the gradient \(\.grad\) of the attribute 'a'"):
        train_by_hand(Prompt(), tmp_path / "run")


def train_by_hand(module: nn.Module, folder: Path) -> sf.Run:
    from splitfed.core.topology import Head, Segment, Topology

    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), module, nn.Linear(6, 10))
    segment = Segment("body", "client", body, ("x",), ("out",))
    topology = Topology("by hand", (segment,), {"x": "client"}, (Head("out", "client", "client"),))
    data = toy_data(60).clients(1, auxiliary=4, victims=4)
    return sf.train(topology, data, rounds=2, logging=sf.Logging(folder=folder))


class OwnState(nn.Module):
    """A dict in its state dict."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_state_of_a_modules_own_is_a_part_of_what_a_folder_compares(tmp_path: Path) -> None:
    assert len(train_by_hand(OwnState(), tmp_path / "run").history) == 2
