"""pFedMe: the inner steps and the weights that follow, by hand; what is sent is not what is used."""

from __future__ import annotations

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.core.local_update import LocalUpdate
from splitfed.core.optimizers import Optim
from splitfed.federated import PFedMe
from tests.federated.examples import common, hand, own
from tests.rounding import single

PLAIN = {"weight": 1.0, "steps": 2, "rate": 0.5}


def by_hand(start: float, rows: int, label: float) -> tuple[float, float]:
    """Theta and w after `rows` batches of two steps each."""
    theta = w = start
    for _ in range(rows):
        for _ in range(2):
            theta -= 0.1 * (2 * (theta - label) + 1.0 * (theta - w))
        w -= 0.5 * 1.0 * (w - theta)
    return theta, w


def test_one_batch_by_hand() -> None:
    # theta: 2 - .1 * 10 = 1, then 1 - .1 * (8 - 1) = .3; w: 2 - .5 * 1.7.
    assert by_hand(2.0, 1, -3.0) == pytest.approx((0.3, 1.15))


def test_two_rounds_by_hand() -> None:
    first, second = hand(PFedMe(**PLAIN)), hand(PFedMe(**PLAIN), rounds=2)
    ends = [by_hand(2.0, 3, 1.0), by_hand(2.0, 1, -3.0)]
    assert [own(first, 0), own(first, 1)] == single([theta for theta, _ in ends])
    mean = 0.75 * ends[0][1] + 0.25 * ends[1][1]
    assert common(first) == single(mean)
    ends = [by_hand(mean, 3, 1.0), by_hand(mean, 1, -3.0)]
    assert [own(second, 0), own(second, 1)] == single([theta for theta, _ in ends])
    assert common(second) == single(0.75 * ends[0][1] + 0.25 * ends[1][1])
    assert float(second.predict(torch.ones(1, 1), client=1)) == single(ends[1][0])
    assert [entry["steps"] for entry in second.history] == [8, 8]


def test_several_epochs_go_on() -> None:
    run = hand(PFedMe(**PLAIN), local=LocalUpdate(local_epochs=2))
    assert own(run, 1) == single(by_hand(2.0, 2, -3.0)[0])
    assert common(run) == single(0.75 * by_hand(2.0, 6, 1.0)[1] + 0.25 * by_hand(2.0, 2, -3.0)[1])


@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0])
def test_the_server_goes_a_part_of_the_way(beta: float) -> None:
    mean = 0.75 * by_hand(2.0, 3, 1.0)[1] + 0.25 * by_hand(2.0, 1, -3.0)[1]
    assert common(hand(PFedMe(**PLAIN, beta=beta))) == single(2 + beta * (mean - 2))


def test_its_own_rate_is_the_clients() -> None:
    run = hand(PFedMe(weight=1.0, steps=1))
    # One step of ten, then w moves by .1 of the way of 1.
    assert common(run, "model/weight") != common(hand(PFedMe(weight=1.0, steps=1, rate=0.5)))
    theta, w = 2.0, 2.0
    for _ in range(3):
        theta -= 0.1 * (2 * (theta - 1) + (theta - w))
        w -= 0.1 * (w - theta)
    assert common(run) == single(0.75 * w + 0.25 * (2 - 0.1 * 1.0))


@pytest.mark.parametrize(
    ("method", "optimizer", "text"),
    [
        (
            PFedMe(),
            Optim("SGD", {"lr": 0.1}),
            "weight=15 times the clients' learning rate 0.1 is 1.5, and the",
        ),
        (PFedMe(weight=10.0), Optim("SGD", {"lr": 0.1}), "take a rate below 0.1, or a smaller weight"),
        (PFedMe(rate=0.01), Optim("SGD", {"lr": 0.1}), "weight=15 times the clients' learning rate 0.1 is 1.5"),
        (PFedMe(), Optim("Adam", {"lr": 0.1}), "weight=15 times the clients' learning rate 0.1 is 1.5"),
    ],
)
def test_rates_that_overshoot_are_refused_before_training(method: PFedMe, optimizer: Optim, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"pfedme .*{text}") as caught:
        hand(method, optimizer=optimizer)
    assert "\n" not in str(caught.value)


def test_a_rate_of_w_that_overshoots_is_refused_where_it_is_given() -> None:
    with pytest.raises(InvalidInput, match=r"pfedme weight=4 times rate 0\.25 is 1, and the step"):
        PFedMe(weight=4.0, rate=0.25)
    assert PFedMe(weight=4.0, rate=0.2).rate == 0.2


def test_other_optimizers_steps_are_as_long_as_they_are() -> None:
    """Adam's rate is no factor of the gradient: only that of w counts."""
    assert hand(PFedMe(rate=0.01), optimizer=Optim("Adam", {"lr": 0.1})).history
