"""FedNova: a round by hand, the a_i of torch's SGD, and FedAvg where all take as many steps."""

from __future__ import annotations

import pytest
import torch

from splitfed.core.optimizers import Optim
from splitfed.federated import FedAvg, FedNova
from splitfed.federated.sgd_reach import sum_step_weights
from tests.federated.examples import common, go, hand
from tests.rounding import single


def test_a_round_by_hand() -> None:
    # Changes .488 and 1, divided by 3 and 1; weighted .75 and .25; times .75 * 3 + .25 * 1 = 2.5.
    assert common(hand("fednova")) == single(2 - 2.5 * (0.75 * 0.488 / 3 + 0.25 * 1.0))
    even = hand(FedNova(weighted=False))
    assert common(even) == single(2 - 2.0 * (0.5 * 0.488 / 3 + 0.5 * 1.0))


def test_equal_steps_are_fedavg() -> None:
    equal = ((2, 1.0), (2, -3.0))
    momentum = Optim("SGD", {"lr": 0.1, "momentum": 0.9})
    for optimizer in (Optim("SGD", {"lr": 0.1}), momentum):
        one = hand(FedNova(), rounds=3, clients=equal, optimizer=optimizer)
        other = hand(FedAvg(), rounds=3, clients=equal, optimizer=optimizer)
        assert common(one) == single(common(other))
    assert common(hand("fednova")) != pytest.approx(common(hand("fedavg")), rel=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "dampening": 0.3},
        {"weight_decay": 0.0},
    ],
    ids=str,
)
def test_the_reach_is_what_torch_does_with_a_constant_gradient(options: dict[str, float]) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, **options)
    for steps in range(1, 6):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert sum_step_weights(Optim("SGD", {"lr": 0.1, **options}), steps)[0] == single(-float(weight.detach()) / 0.1)
    assert sum_step_weights(Optim("SGD", {"lr": 0.1}), 0) == (0.0, None)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.3}], ids=str)
def test_the_reach_goes_on_from_what_the_momentum_holds(options: dict[str, float]) -> None:
    optim = Optim("SGD", {"lr": 0.1, **options})
    whole, after = sum_step_weights(optim, 7)
    first, held = sum_step_weights(optim, 3)
    second, end = sum_step_weights(optim, 4, held)
    assert (first + second, end) == (pytest.approx(whole), pytest.approx(after))


def test_statistics_are_plainly_averaged() -> None:
    one, other = (go(method, 1).method_state["weights"] for method in (FedNova(), FedAvg()))
    assert torch.equal(one["body/norm.running_var"], other["body/norm.running_var"])
    assert torch.equal(one["body/norm.num_batches_tracked"], other["body/norm.num_batches_tracked"])
    assert list(one) == list(other)
