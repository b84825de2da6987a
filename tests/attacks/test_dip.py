"""The deep image prior: it draws a digit of which all is seen, each by itself, and no more than noise allows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge, Releases
from splitfed.attacks.reconstruction import dip
from splitfed.attacks.reconstruction.dip import Dip, SkipNetworks
from splitfed.attacks.reconstruction.inversion import row_misfit
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator
from tests.attacks.examples import digits

PLAN = Dip(iterations=400, width=8, lr=0.03)
SCALE = 0.3


def release(x: Tensor) -> Releases:
    return {"z": 2 * x}


def noisy(number: int, scale: float = SCALE) -> Callable[[Tensor], Releases]:
    drawn = generator(number, "noise")
    return lambda x: {"z": 2 * x + scale * torch.randn(x.shape, generator=drawn)}


def searched(attack: Dip, seen: Releases, sample: Callable[[Tensor], Releases] = release, seed: int = 0) -> Tensor:
    stamp = Stamp("predict", 0, 0, 0, "victims")
    view = View("server", (Message("client0", "server", "activation", "bottom->top", dict(seen), stamp),))
    known = Knowledge(tuple(seen["z"].shape[1:]), (0.0, 1.0), upstream=release, sample=sample)
    return attack(view, known, generator(seed)).prediction


def truth(count: int = 3) -> Tensor:
    return digits().victims.x[:count]


def test_a_digit_of_which_all_is_seen_is_drawn() -> None:
    found = searched(PLAN, release(truth()))
    errors = (found - truth()).square().flatten(1).mean(1)
    assert float(-10 * errors.max().log10()) > 30


@pytest.mark.exhaustive
def test_it_does_not_fit_below_the_noise() -> None:
    """The noise that it measures itself has the variance .09; a release that it fits further is one that it copies."""
    seen = noisy(1)(truth(8))
    found = searched(PLAN, seen, noisy(2))
    blind = searched(PLAN, seen)
    misfits = [row_misfit(release(x), seen) for x in (found, blind)]
    # It is measured in 8 x 64 numbers, to 6 %; a step of the search goes a little below it.
    assert float(misfits[0].min()) > 0.75 * SCALE**2
    assert float(misfits[0].max()) < 1.5 * SCALE**2
    assert float(misfits[1].mean()) < 0.5 * SCALE**2


def test_victims_have_no_part_in_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks beside one another: a gradient of the picture of one has nothing of the weights of the other."""
    net = SkipNetworks(2, (1, 9, 7), 4, 3)
    one, other = net(net.noise(generator(0)))
    assert one.shape == (1, 9, 7)
    assert not torch.allclose(one, other)
    grads = torch.autograd.grad(one.square().sum(), list(net.parameters()))
    for g in grads:
        others = g.chunk(2)[1]
        assert float(others.abs().max()) == 0.0
    assert any(float(g.chunk(2)[0].abs().max()) > 0 for g in grads)
    plan = Dip(iterations=5, width=4)
    monkeypatch.setattr(dip, "VICTIMS_AT_ONCE", 2)
    assert searched(plan, release(truth(5))).shape == (5, 1, 8, 8)


def test_the_same_seed_draws_the_same_picture() -> None:
    plan = Dip(iterations=5, width=4)
    one, two, other = (searched(plan, release(truth()), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_total_variation_makes_smoother_pictures() -> None:
    rough, smooth = (searched(Dip(iterations=60, width=8, lr=0.03, tv=tv), release(truth())) for tv in (0.0, 3.0))

    def variation(x: Tensor) -> float:
        return float(x.diff(dim=2).square().mean() + x.diff(dim=3).square().mean())

    assert variation(smooth) < 0.5 * variation(rough)


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 4), (2, 16, 9)])
def test_pictures_of_any_size(shape: tuple[int, ...]) -> None:
    net = SkipNetworks(2, shape, 4, 3)
    found = net(net.noise(generator(0)))
    assert found.shape == (2, *shape)
    assert len(net.down) == max(0, math.floor(math.log2(min(shape[1:]) / 4)))
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("shape", [(5,), (3, 1, 1)])
def test_rows_that_are_no_images_are_refused_in_a_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InvalidInput, match=r"^dip reconstructs images \(channels, height, width\) of two pixels or more; rows"
    ):
        searched(PLAN, {"z": torch.zeros(2, *shape)})
