"""Feature-space hijacking: it reads what it trained the client to send, and nothing where noise drowns it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from splitfed.attacks.fsha import Fsha, Hijacker, gradient_penalty
from splitfed.attacks.intruder import Seen
from splitfed.attacks.networks import Critic, Translator
from splitfed.attacks.scaling import Scale
from splitfed.defenses import Noise
from splitfed.errors import InvalidInput
from splitfed.run import Run
from splitfed.seeding import generator
from tests.intruder_zoo import error, go, insider

PLAN = Fsha.preset("fast", width=32)


@cache
def hijacked(noise: float = 0.0) -> Run:
    return go(PLAN, rounds=50, defenses=[Noise(scale=noise)] if noise else [])


def test_it_reads_victims_that_nobody_trained_on() -> None:
    (result,) = hijacked().attack(PLAN)
    guess, mean = error(hijacked(), result.guess)
    assert guess < mean / 2


def test_its_error_on_its_own_rows_falls_in_the_history() -> None:
    curve = [entry["intruders"]["server"]["auxiliary_mse"] for entry in hijacked().history]
    assert curve[-1] < curve[0] / 20


def test_noise_drowns_it() -> None:
    run = go(PLAN, rounds=8, defenses=[Noise(scale=1e3)])
    (result,) = run.attack(PLAN)
    guess, mean = error(run, result.guess)
    assert guess > 0.9 * mean


def test_the_penalty_is_the_squared_distance_of_the_slope_from_one() -> None:
    """A critic 3 a + 4 b has slope 5 everywhere: (5 - 1)^2 = 16."""
    critic = nn.Linear(2, 1)
    critic.weight.data = torch.tensor([[3.0, 4.0]])
    found = gradient_penalty(critic, torch.zeros(7, 2), torch.ones(7, 2), generator(0))
    assert float(found.detach()) == pytest.approx(16.0, abs=1e-4)


def test_the_client_is_sent_the_slope_of_the_critics_mean() -> None:
    run = go(PLAN)
    hijacker = insider(run)
    assert isinstance(hijacker, Hijacker)
    linear = nn.Linear(2, 1)
    linear.weight.data = torch.tensor([[2.0, -6.0]])
    hijacker.nets["critic"] = nn.Sequential(linear, nn.Flatten(0))
    hijacker.add("critic", hijacker.nets["critic"], 1e-3)
    sent = hijacker.learn(Seen(torch.randn(4, 2), None), {}, generator(0))
    assert torch.allclose(sent, torch.tensor([0.5, -1.5]).expand(4, 2))


def test_a_disguised_hijacker_is_honest_where_the_honest_gradient_is_long() -> None:
    hijacker = insider(go(Fsha.preset("fast", disguise=2.0)))
    assert isinstance(hijacker, Hijacker)
    hijacker.usual = 1.0
    mine, honest = torch.full((4, 2), 7.0), torch.zeros(4, 2)
    honest[0, 0] = 2.5
    assert hijacker.choose(mine, honest) is honest
    honest[0, 0] = 1.5
    assert hijacker.choose(mine, honest) is mine
    assert hijacker.usual == pytest.approx(0.9 * (0.9 * 1.0 + 0.1 * 2.5) + 0.1 * 1.5)


@pytest.mark.parametrize("source", [(1, 8, 8), (3, 9, 7), (5,), (6, 4, 4)])
@pytest.mark.parametrize("target", [(1, 8, 8), (2, 5, 3), (4,), (3, 28, 28)])
def test_networks_map_any_shape_to_any_other(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    x = torch.randn(2, *source)
    assert Translator(source, target, 4, 1)(x).shape == (2, *target)
    told = Translator(source, target, 4, 1, classes=3, bounded=True)
    one, two = (told(x, torch.tensor([k, k])).detach() for k in (0, 1))
    assert one.shape == (2, *target)
    assert float(one.abs().max()) <= 1
    assert not torch.equal(one, two)
    assert Critic(source, 4, 1)(x).shape == (2,)


def test_scaling_there_and_back() -> None:
    scale = Scale((-1.0, 3.0))
    x = torch.tensor([-1.0, 0.0, 3.0])
    assert scale.down(x).tolist() == [-1.0, -0.5, 1.0]
    assert torch.equal(scale.up(scale.down(x)), x)
    assert torch.equal(Scale(None).up(Scale(None).down(x)), x)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lr": 0.0}, "fsha lr=0.0"),
        ({"penalty": -1.0}, "fsha penalty=-1.0"),
        ({"width": 0}, "fsha width=0"),
        ({"disguise": 1.0}, "fsha disguise=1.0"),
        ({"momentum": 1.0}, "fsha momentum=1.0"),
    ],
)
def test_bad_parameters_are_refused(change: dict[str, float], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        Fsha(**change)  # type: ignore[arg-type]


def test_the_authors_settings() -> None:
    plan = Fsha.preset("paper")
    assert (plan.lr, plan.critic_lr, plan.penalty) == (1e-5, 1e-4, 500.0)
