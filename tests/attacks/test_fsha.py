"""Feature-space hijacking: it reads what it trained the client to send, and nothing where noise drowns it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from splitfed.attacks.networks.networks import Critic, Scale, Translator
from splitfed.attacks.training_time.fsha import Fsha, Hijacker, gradient_penalty
from splitfed.attacks.training_time.fsha_networks import fsha_critic, fsha_decoder, fsha_encoder
from splitfed.attacks.training_time.training_attack import Seen
from splitfed.core.random import generator, stream
from splitfed.defenses import Noise
from splitfed.training.run import Run
from tests.attacks.training_time_examples import attack_state, error, go

PLAN = Fsha.with_budget("quick", width=32)


@cache
def hijacked(noise: float = 0.0) -> Run:
    return go(PLAN, rounds=50, defenses=[Noise(scale=noise)] if noise else [])


def test_it_reads_victims_that_nobody_trained_on() -> None:
    (result,) = hijacked().attack(PLAN)
    prediction, mean = error(hijacked(), result.prediction)
    assert prediction < mean / 2


def test_its_error_on_its_own_rows_falls_in_the_history() -> None:
    curve = [entry["training_attacks"]["server"]["auxiliary_mse"] for entry in hijacked().history]
    assert curve[-1] < curve[0] / 20


@pytest.mark.exhaustive
def test_the_penalty_holds_the_critics_slope_near_one() -> None:
    """Between what arrives and what the encoder makes; a critic without a penalty grows as steep as it can."""
    run = hijacked()
    found = attack_state(run)
    assert isinstance(found, Hijacker)
    z = run.observe("server").tensors()[found.site.value][:64]
    with torch.no_grad():
        made = found.nets["encoder"](found.scale.down(run.data.auxiliary.x[:64]))
    away = float(gradient_penalty(found.nets["critic"], z, made, generator(0)).detach()) ** 0.5
    assert away < 0.5


def test_noise_drowns_it() -> None:
    run = go(PLAN, rounds=8, defenses=[Noise(scale=1e3)])
    (result,) = run.attack(PLAN)
    prediction, mean = error(run, result.prediction)
    assert prediction > 0.9 * mean


def test_the_penalty_is_the_squared_distance_of_the_slope_from_one() -> None:
    """A critic 3 a + 4 b has slope 5 everywhere: (5 - 1)^2 = 16."""
    critic = nn.Linear(2, 1)
    critic.weight.data = torch.tensor([[3.0, 4.0]])
    found = gradient_penalty(critic, torch.zeros(7, 2), torch.ones(7, 2), generator(0))
    assert float(found.detach()) == pytest.approx(16.0, abs=1e-4)


def test_a_slope_by_channel_is_measured_in_each() -> None:
    """Slopes of length 5 in the first channel and 1 in the second: ((5 - 1)^2 + 0) / 2 = 8; over both, root 26."""
    critic = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    critic[1].weight.data = torch.tensor([[3.0, 4.0, 0.0, 1.0]])
    ends = torch.zeros(7, 2, 1, 2), torch.ones(7, 2, 1, 2)
    assert float(gradient_penalty(critic, *ends, generator(0), True).detach()) == pytest.approx(8.0, abs=1e-4)
    whole = float(gradient_penalty(critic, *ends, generator(0)).detach())
    assert whole == pytest.approx((26**0.5 - 1) ** 2, abs=1e-4)


def convolutions(net: nn.Module) -> list[tuple[int, int, int]]:
    """Inputs, outputs and stride of each, in order."""
    kinds = (nn.Conv2d, nn.ConvTranspose2d)
    return [(m.in_channels, m.out_channels, m.stride[0]) for m in net.modules() if isinstance(m, kinds)]


AUTHORS = {  # cut at their levels 1, 3 and 4 -> encoder, decoder
    (64, 16, 16): ([(3, 64, 2), (64, 64, 1)], [(64, 256, 2), (256, 3, 1)]),
    (128, 8, 8): ([(3, 64, 2), (64, 128, 2), (128, 128, 1)], [(128, 256, 2), (256, 128, 2), (128, 3, 1)]),
    (256, 4, 4): (
        [(3, 64, 2), (64, 128, 2), (128, 256, 2), (256, 256, 1)],
        [(256, 256, 2), (256, 128, 2), (128, 3, 2)],
    ),
}


@pytest.mark.parametrize("cut", AUTHORS)
def test_on_images_the_networks_are_the_authors(cut: tuple[int, ...]) -> None:
    encoder, decoder = fsha_encoder((3, 32, 32), cut), fsha_decoder(cut, (3, 32, 32), 256, bounded=True)
    assert (convolutions(encoder), convolutions(decoder)) == AUTHORS[cut]
    critic = convolutions(fsha_critic(cut, 256, 6))
    assert critic == [(cut[0], 256, 1), *[(256, 256, 1)] * 12, (256, 256, 2)]


def test_the_encoder_is_linear_and_starts_as_glorot_says() -> None:
    encoder = fsha_encoder((1, 28, 28), (32, 4, 4))
    x, y = torch.randn(2, 3, 1, 28, 28)
    assert torch.allclose(encoder(x + 2 * y), encoder(x) + 2 * encoder(y), atol=1e-4)
    last = [m for m in encoder.modules() if isinstance(m, nn.Conv2d)][-1]
    bound = (6 / (2 * 32 * 9)) ** 0.5
    assert 0.98 * bound < float(last.weight.detach().abs().max()) <= bound


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 9, 7), (1, 8, 8), (1, 64, 64)])
@pytest.mark.parametrize("cut", [(4, 4, 4), (6, 7, 7), (2, 1, 1), (5, 12, 12)])
def test_cuts_of_any_size_are_reached(image: tuple[int, ...], cut: tuple[int, ...]) -> None:
    z = fsha_encoder(image, cut)(torch.randn(2, *image))
    assert z.shape == (2, *cut)
    found = fsha_decoder(cut, image, 4, bounded=True)(z).detach()
    assert found.shape == (2, *image)
    assert float(found.abs().max()) <= 1
    assert fsha_critic(cut, 4, 1)(z).shape == (2,)


def test_the_client_is_sent_the_slope_of_the_critics_mean() -> None:
    run = go(PLAN)
    hijacker = attack_state(run)
    assert isinstance(hijacker, Hijacker)
    linear = nn.Linear(2, 1)
    linear.weight.data = torch.tensor([[2.0, -6.0]])
    hijacker.nets["critic"] = nn.Sequential(linear, nn.Flatten(0))
    hijacker.nets.add("critic", hijacker.nets["critic"], 1e-3)
    sent = hijacker.learn(Seen(torch.randn(4, 2), None), {}, generator(0))
    assert torch.allclose(sent, torch.tensor([0.5, -1.5]).expand(4, 2))


def test_a_disguised_hijacker_is_honest_where_the_honest_gradient_is_long() -> None:
    hijacker = attack_state(go(Fsha.with_budget("quick", disguise=2.0)))
    assert isinstance(hijacker, Hijacker)
    hijacker.numbers["usual"] = 1.0
    mine, honest = torch.full((4, 2), 7.0), torch.zeros(4, 2)
    honest[0, 0] = 2.5
    assert hijacker.choose(mine, honest) is honest
    honest[0, 0] = 1.5
    assert hijacker.choose(mine, honest) is mine
    assert hijacker.numbers["usual"] == pytest.approx(0.9 * (0.9 * 1.0 + 0.1 * 2.5) + 0.1 * 1.5)


@pytest.mark.parametrize("source", [(1, 8, 8), (3, 9, 7), (5,), (6, 4, 4)])
@pytest.mark.parametrize("target", [(1, 8, 8), (2, 5, 3), (4,), (3, 28, 28)])
def test_networks_map_any_shape_to_any_other(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    x = torch.randn(2, *source, generator=generator(0, "shapes"))
    with stream(0):
        assert Translator(source, target, 4, 1)(x).shape == (2, *target)
        # Wide enough that some unit is alive.
        told = Translator(source, target, 16, 1, classes=3, bounded=True)
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


def test_the_authors_settings() -> None:
    plan = Fsha.with_budget("full")
    assert (plan.lr, plan.critic_lr, plan.penalty) == (1e-5, 1e-4, 500.0)
    assert (plan.width, plan.blocks, plan.per_channel) == (256, 6, True)
