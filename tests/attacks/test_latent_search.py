"""Latent search in worlds whose answer is known: a row of the prior itself, a release of noise, a linear prior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Knowledge, Releases
from splitfed.attacks.networks.autoencoder import VariationalAutoencoder
from splitfed.attacks.reconstruction import latent_search
from splitfed.attacks.reconstruction.latent_search import LatentSearch, LatentSpace, descend_rows, divergence
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator, stream

SHAPE, LATENT = (2, 5, 4), 3
MIXING = torch.randn(40, 24, generator=generator(1, "mixing")) / 6


def release(x: Tensor) -> Releases:
    """Of forty numbers 24, bent."""
    return {"z": torch.tanh(x.flatten(1) @ MIXING)}


def noisy(scale: float) -> Callable[[Tensor], Releases]:
    drawn = generator(2, "noise")
    return lambda x: {"z": release(x)["z"] + scale * torch.randn(len(x), 24, generator=drawn)}


def rows(count: int, seed: int) -> Tensor:
    """Rows on a curved surface of three dimensions, inside (0, 1)."""
    known = torch.randn(LATENT, 40, generator=generator(0, "surface"))
    u = torch.randn(count, LATENT, generator=generator(seed, "rows"))
    return torch.sigmoid(u @ known).view(count, *SHAPE)


PLAN = LatentSearch(
    latent=LATENT, width=32, epochs=60, lr=1e-2, draws=64, restarts=4, latent_iterations=150, iterations=0, kl=0.0
)


def knowledge(scale: float = 0.0) -> Knowledge:
    return Knowledge(
        SHAPE, (0.0, 1.0), auxiliary=rows(200, 1), upstream=release, sample=noisy(scale) if scale else release
    )


@pytest.fixture(scope="module")
def prior() -> VariationalAutoencoder:
    with stream(0):
        return PLAN.train_prior(knowledge(), generator(0))


def view(seen: Releases) -> View:
    stamp = Stamp("predict", 0, 0, 0, "victims")
    return View("server", (Message("client0", "server", "activation", "bottom->top", dict(seen), stamp),))


def error(x: Tensor, truth: Tensor) -> float:
    return float((x - truth).square().mean())


def samples(prior: VariationalAutoencoder, count: int, seed: int) -> Tensor:
    return prior.decode(torch.randn(count, LATENT, generator=generator(seed, "latent")))


def test_the_prior_knows_rows_that_it_was_not_shown(prior: VariationalAutoencoder) -> None:
    """Three numbers hold all of a row: what a code of three numbers keeps of others is most of their variance."""
    others = rows(100, 2)
    variance = error(others.mean(0), others)
    assert error(prior.decode(prior.encode(others)[0]), others) < 0.15 * variance
    drawn = samples(prior, 100, 0)
    # Samples are as different from one another as rows are.
    assert float(drawn.flatten(1).var(0).mean()) == pytest.approx(variance, rel=0.4)


def test_a_row_of_the_prior_is_found(prior: VariationalAutoencoder) -> None:
    truth = samples(prior, 8, 1)
    space = LatentSpace(prior, release(truth), knowledge(), kl=0.0, anchor=0.0)
    drawn = torch.randn(64, LATENT, generator=generator(3))
    u = space.best(drawn, 4, 200, 0.1)
    assert float(space.losses(u.unsqueeze(1)).max()) < 1e-4
    assert error(space.free(u, 0, 0.1), truth) < 1e-4


def test_the_restart_is_chosen_by_the_loss_of_the_attack(prior: VariationalAutoencoder) -> None:
    """After no step at all: each victim gets the one of all samples with the least loss."""
    truth = samples(prior, 8, 1)
    space = LatentSpace(prior, release(truth), knowledge(), kl=0.3, anchor=0.0)
    drawn = torch.randn(64, LATENT, generator=generator(3))
    losses = space.losses(drawn.expand(8, -1, -1))
    least = losses.min(1)
    assert len(set(least.indices.tolist())) > 2
    torch.testing.assert_close(space.best(drawn, 1, 0, 0.1), drawn[least.indices])
    torch.testing.assert_close(space.best(drawn, 64, 0, 0.1), drawn[least.indices])
    # The searches do not end in the order in which they began: the least loss behind them is kept.
    starts = drawn[losses.topk(6, 1, largest=False).indices]
    ended = space.losses(descend_rows(starts, space.losses, 12, 0.3))
    assert bool((ended.argmin(1) > 0).any())
    found = space.losses(space.best(drawn, 6, 12, 0.3).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, ended.min(1).values, rtol=1e-4, atol=1e-6)


def test_victims_are_searched_each_alone(prior: VariationalAutoencoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = release(rows(5, 4))
    plan = replace(PLAN, epochs=2, latent_iterations=20, iterations=20, kl=0.1)
    together, again = (plan(view(seen), knowledge(), generator(0)).prediction for _ in range(2))
    assert torch.equal(together, again)
    monkeypatch.setattr(latent_search, "VICTIMS_AT_ONCE", 2)
    # The variance of a release is summed up in other blocks.
    torch.testing.assert_close(plan(view(seen), knowledge(), generator(0)).prediction, together, atol=1e-3, rtol=0)
    assert not torch.equal(plan(view(seen), knowledge(), generator(1)).prediction, together)


def test_of_a_release_of_noise_the_answer_is_a_sample_of_the_prior(prior: VariationalAutoencoder) -> None:
    """Nobody told the attack of that noise: what it finds is no further from the truth than another row would be."""
    truth = rows(200, 5)
    known = knowledge()
    z = {"z": torch.randn(200, 24, generator=generator(6)) * release(truth)["z"].std()}
    space = LatentSpace(prior, z, known, kl=10.0, anchor=10.0)
    u = space.best(torch.randn(64, LATENT, generator=generator(3)), 4, 60, 0.1)
    assert float(divergence(u).mean()) < 0.1
    found = error(space.free(u, 60, 0.05), truth)
    mean = error(truth.mean(0), truth)
    assert mean < found < 2.4 * mean  # another row has 2.0; 200 rows say so to a tenth


def test_noise_that_is_known_leads_to_the_middle_of_the_prior(prior: VariationalAutoencoder) -> None:
    """Noise of ten times the release tells nothing; the most probable u is then near 0, and h where u left it."""
    truth = rows(50, 5)
    z = noisy(10.0)(truth)
    spaces = [LatentSpace(prior, z, knowledge(scale), kl=0.0, anchor=0.0) for scale in (10.0, 0.0)]
    drawn = torch.randn(64, LATENT, generator=generator(3))
    known, unknown = (space.best(drawn, 2, 100, 0.1) for space in spaces)
    assert float(known.square().mean()) < 0.1 < 1.0 < float(unknown.square().mean())
    moved = [error(space.free(known, 60, 0.05), prior.decode(known)) for space in spaces]
    assert moved[0] < 0.01 * moved[1]


def test_stage_two_leaves_the_prior_and_the_anchor_holds_it(prior: VariationalAutoencoder) -> None:
    """Rows beside the surface: freed activations fit their release, and the more so the less they are held."""
    truth = (rows(8, 7) + 0.1 * torch.randn(8, *SHAPE, generator=generator(8))).clamp(0, 1)
    z = release(truth)
    misfits = []
    for anchor, steps in ((0.0, 0), (1e4, 100), (10.0, 100), (0.0, 100)):
        space = LatentSpace(prior, z, knowledge(), kl=0.0, anchor=anchor)
        u = space.best(torch.randn(64, LATENT, generator=generator(3)), 2, 60, 0.1)
        misfits.append(error(release(space.free(u, steps, 0.02))["z"], z["z"]))
    assert misfits[1] == pytest.approx(misfits[0], rel=0.05)
    assert 1.3 * misfits[3] < misfits[2] < 0.9 * misfits[0]


def test_with_as_many_latent_numbers_as_pixels_and_no_kl_it_is_a_search_of_the_row() -> None:
    """G the identity: least squares has one answer where the release tells all, and the search finds it."""
    square = 2 * torch.linalg.qr(torch.randn(6, 6, generator=generator(9)))[0]
    auxiliary, truth = (torch.randn(50, 6, generator=generator(s)) for s in (10, 11))
    known = Knowledge(
        (6,), auxiliary=auxiliary, upstream=lambda x: {"z": x @ square}, sample=lambda x: {"z": x @ square}
    )
    prior = VariationalAutoencoder((6,), 6, 6)
    with torch.no_grad():
        prior.first[1].weight.copy_(torch.eye(6))  # type: ignore[union-attr, operator]
        prior.rest[0] = torch.nn.Identity()
        prior.rest[1].weight.copy_(torch.eye(6))  # type: ignore[union-attr, operator]
    space = LatentSpace(prior.requires_grad_(False), {"z": truth @ square}, known, kl=0.0, anchor=0.0)
    assert error(space.best(auxiliary, 2, 500, 0.1), truth) < 1e-5
    assert error(space.free(auxiliary, 500, 0.1), truth) < 1e-5


def test_divergence_by_hand() -> None:
    """Mean 1, variance 1: half of one. Mean 0, variance 4: (4 - 1 - log 4) / 2. Of a single number half its square."""
    u = torch.tensor([[0.0, 2.0], [-2.0, 2.0], [-1.0, 1.0]])
    assert divergence(u).tolist() == pytest.approx([0.5, 0.8068528, 0.0])
    assert divergence(torch.tensor([[3.0]])).tolist() == [4.5]


def test_work_is_told_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    plan = replace(PLAN, epochs=3, latent_iterations=20, iterations=10)
    plan(view(release(rows(3, 4))), knowledge(), generator(0), lambda done, total: told.append((done, total)))
    assert told == [*((n, 33) for n in (1, 2, 3)), (13, 33), (23, 33), (33, 33)]
