"""Worlds in which every part of the two inversions of He, Zhang and Lee is what makes them succeed.

Their optimum is known: a quadratic that can be solved, the posterior mean of a Gaussian, a curve that no line follows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Releases
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator

Release = Callable[[Tensor], Releases]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "rows"))


def view(seen: Releases) -> View:
    stamp = Stamp("predict", 0, 0, 0, "victims")
    return View("server", (Message("client0", "server", "activation", "bottom->top", dict(seen), stamp),))


def searched(attack: Attack, seen: Releases, mean: Release, sample: Release, shape: tuple[int, ...]) -> Tensor:
    """What `attack` finds in `seen` that knows the function behind it."""
    knowledge = Knowledge(shape, upstream=mean, sample=sample)
    return attack(view(seen), knowledge, generator(0)).prediction


A = rows(10, 16, seed=1) / 4
SHAPE = (1, 4, 4)


def seen_through(x: Tensor) -> Releases:
    """Ten numbers of sixteen pixels: many images release the same."""
    return {"z": x.flatten(1) @ A.T}


def differences() -> Tensor:
    """The matrix D for which the total variation of a flattened 4x4 image is |D x|^2 / 12, twelve pairs a direction."""
    index = torch.arange(16).view(4, 4)
    pairs = [*zip(index[1:].flatten(), index[:-1].flatten(), strict=True)]
    pairs += [*zip(index[:, 1:].flatten(), index[:, :-1].flatten(), strict=True)]
    found = torch.zeros(len(pairs), 16)
    for row, (one, other) in enumerate(pairs):
        found[row, one], found[row, other] = 1.0, -1.0
    return found


def optimum(z: Tensor, tv: float, l2: float) -> Tensor:
    """The minimum of mean((A x - z)^2) + tv TV(x) + l2 mean(x^2), row by row: (n, 16)."""
    smooth = differences()
    left = A.T @ A / 10 + tv * smooth.T @ smooth / 12 + l2 * torch.eye(16) / 16
    return torch.linalg.solve(left, (z @ A / 10).T).T


@pytest.mark.parametrize(("tv", "l2"), [(0.3, 0.0), (0.01, 0.5), (0.0, 0.2)])
def test_rmle_ends_where_its_loss_is_smallest(tv: float, l2: float) -> None:
    seen = seen_through(rows(3, *SHAPE, seed=2))
    found = searched(Rmle(iterations=1200, lr=0.05, tv=tv, l2=l2), seen, seen_through, seen_through, SHAPE)
    best = optimum(seen["z"], tv, l2)
    assert torch.allclose(found.flatten(1), best, atol=2e-3)
    # Without either regulariser it would end elsewhere.
    assert float((best - optimum(seen["z"], tv, l2 + 0.1)).abs().max()) > 0.02
    assert float((best - optimum(seen["z"], tv + 0.1, l2)).abs().max()) > 0.02


def test_rmle_smooths_as_much_as_the_noise_that_it_measures_asks_for() -> None:
    """Noise of variance v adds 2 v n_x / (n_z s) to the weight of the total variation, s = .2 here."""
    variance, victims = 0.04, 400
    clean = seen_through(rows(victims, *SHAPE, seed=2))["z"]
    seen = {"z": clean + variance**0.5 * rows(victims, 10, seed=3)}
    drawn = generator(4, "noise")

    def noisy(x: Tensor) -> Releases:
        return {"z": seen_through(x)["z"] + variance**0.5 * torch.randn(len(x), 10, generator=drawn)}

    plan = Rmle(iterations=600, lr=0.05, tv=0.01, l2=0.05)
    found = searched(plan, seen, seen_through, noisy, SHAPE).flatten(1)
    weight = 0.01 + 2 * variance * 16 / (10 * 0.2)
    best = optimum(seen["z"], weight, 0.05)
    # 4000 draws: the variance is known to 2 %; what the search then finds differs by less than that.
    assert float((found - best).norm() / best.norm()) < 0.02
    assert float((optimum(seen["z"], 0.01, 0.05) - best).norm() / best.norm()) > 0.2


def asked(attack: InverseNetwork, known: Tensor, seen: Releases, query: Release, **facts: object) -> Tensor:
    """What a decoder finds in `seen` that was trained on what `query` releases of the rows `known`."""
    knowledge = Knowledge(tuple(known.shape[1:]), auxiliary=known, query=query, **facts)  # type: ignore[arg-type]
    return attack(view(seen), knowledge, generator(0)).prediction


def blurred(count: int, number: int) -> Release:
    """A release of 8 numbers of 6, with noise of deviation 2 that is drawn anew at every query."""
    mixing, drawn = rows(6, 8, seed=5), generator(number, "queries")

    def query(x: Tensor) -> Releases:
        return {"z": x @ mixing + 2 * torch.randn(len(x), 8, generator=drawn)}

    return query


def test_the_decoder_learns_the_noise_from_its_queries() -> None:
    """x ~ N(0, I), z = x M + N(0, 4): the posterior mean leaves tr((I + M M' / 4)^-1) / 6, and nobody less.

    An inverse of the same function without its noise would leave many times the variance of the rows.
    """
    mixing = rows(6, 8, seed=5)
    best = float(torch.linalg.inv(torch.eye(6) + mixing @ mixing.T / 4).trace()) / 6
    known, victims = rows(1500, 6, seed=6), rows(1500, 6, seed=7)
    plan = InverseNetwork(epochs=2, batch_size=64, lr=1e-3, width=2, queries=2)
    found = asked(plan, known, blurred(6, 2)(victims), blurred(6, 1))
    # Of 9000 squares the mean has a relative deviation of .015.
    assert float((found - victims).square().mean()) == pytest.approx(best, rel=0.08)
    blind = torch.linalg.pinv(mixing)
    assert float((blurred(6, 2)(victims)["z"] @ blind - victims).square().mean()) > 2 * best


def curved(x: Tensor) -> Releases:
    """x in (-1, 1) as |x| and a hint of its sign: a straight line has the hint alone."""
    return {"z": torch.cat([x.abs(), x.sign()], 1)}


def test_the_network_learns_what_no_line_follows() -> None:
    known, victims = (2 * torch.rand(400, 3, generator=generator(seed, "curve")) - 1 for seed in (1, 2))
    plan = InverseNetwork(epochs=25, batch_size=32, lr=5e-3, width=4, queries=1)
    found = asked(plan, known, curved(victims), curved, value_range=(-1.0, 1.0))
    # The best line is sign(x) / 2, with an error of 1/12.
    assert float((found - victims).square().mean()) < 0.1 / 12


def test_every_pass_of_queries_trains_the_network() -> None:
    """Few rows and much noise: one pass is learnt by heart, twenty are not."""
    known, victims = (2 * torch.rand(60, 3, generator=generator(seed, "curve")) - 1 for seed in (1, 2))
    victims = victims.repeat(5, 1)

    def noisy(number: int) -> Release:
        drawn = generator(number, "noise")
        return lambda x: {"z": curved(x)["z"] + 0.3 * torch.randn(len(x), 6, generator=drawn)}

    errors = []
    for queries in (1, 20):
        plan = InverseNetwork(epochs=60, batch_size=20, lr=5e-3, width=8, queries=queries)
        found = asked(plan, known, noisy(1)(victims), noisy(2), value_range=(-1.0, 1.0))
        errors.append(float((found - victims).square().mean()))
    assert errors[1] < 0.85 * errors[0], errors


def test_what_is_almost_exact_is_learnt_in_its_own_units() -> None:
    """Behind a release that bends by a thousandth least squares leaves a thousandth, and the network less than that."""

    def bent(x: Tensor) -> Releases:
        return {"z": x + 1e-3 * (3 * x).sin()}

    known, victims = (2 * torch.rand(400, 3, generator=generator(seed, "curve")) - 1 for seed in (1, 2))
    plan = InverseNetwork(epochs=25, batch_size=32, lr=5e-3, width=4, queries=1)
    found = asked(plan, known, bent(victims), bent)
    # What a line leaves of sin(3 x) on (-1, 1) has a variance of .28.
    assert float((found - victims).square().mean()) < 0.28e-6 / 5
