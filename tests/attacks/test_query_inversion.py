"""Inversion by queries alone: exact where a release tells all, by its prior where it does not, refused under noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.base import Knowledge, Releases
from splitfed.attacks.networks.query_passes import is_repeatable
from splitfed.attacks.reconstruction.query_inversion import QueryInversion
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator
from splitfed.defenses import Noise
from tests.attacks.examples import lenet_run

ROWS, VICTIMS, WIDTH = 80, 6, 5


def smooth(outputs: int, seed: int = 0) -> nn.Module:
    """A client of one layer whose weights nobody is told."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, outputs), nn.Tanh()).requires_grad_(False)


class World:
    """Rows behind a client: what is asked, and what is found of the victims."""

    def __init__(self, client: Callable[[Tensor], Tensor]) -> None:
        x = torch.rand(ROWS + VICTIMS, WIDTH, generator=generator(0, "rows"))
        self.client, self.asked = client, 0
        self.truth, self.known = x[:VICTIMS], x[VICTIMS:]

    def query(self, x: Tensor) -> Releases:
        self.asked += len(x)
        return {"z": self.client(x)}

    def errors(self, attack: QueryInversion) -> Tensor:
        """Return the squared errors of the victims, (victims,)."""
        sent = Message("c", "server", "activation", "e", {"z": self.client(self.truth)}, Stamp("rehearse", 0, 0, 0))
        knowledge = Knowledge((WIDTH,), value_range=(0.0, 1.0), auxiliary=self.known, query=self.query)
        found = attack(View("server", (sent,)), knowledge, generator(0, "attack")).prediction
        return (found - self.truth).square().mean(1)


def test_without_a_weight_it_ends_at_the_rounding_of_the_release() -> None:
    assert float(World(smooth(8)).errors(QueryInversion(row_queries=60, prior=0.0)).max()) < 1e-9


def test_it_asks_for_no_more_than_it_may() -> None:
    """Beside auxiliary rows: for the regression, for their variance, and twice eight less one for the repetition."""
    for each in (6, 30, 61):
        world = World(nn.Sequential(smooth(8), nn.Linear(8, 3).requires_grad_(False)))
        world.errors(QueryInversion(row_queries=each, prior=1e-3))
        assert world.asked - 2 * ROWS - 15 <= each * VICTIMS


def test_more_queries_find_more() -> None:
    few, many = (float(World(smooth(8)).errors(QueryInversion(each, 0.0)).mean()) for each in (8, 24))
    assert many < few / 10


def test_what_a_release_does_not_tell_the_prior_tells() -> None:
    """Three numbers of five: with a prior no worse than the mean row, without one as the steps go."""
    world = World(smooth(3))
    spread = float(world.known.var(0).mean())
    assert float(world.errors(QueryInversion(row_queries=60, prior=1e-2)).mean()) < spread
    hopeless = World(lambda x: torch.zeros(len(x), 3))
    assert float(hopeless.errors(QueryInversion(row_queries=60)).mean()) > 0.5 * spread


def test_a_row_goes_alone_as_it_goes_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    attack, world = QueryInversion(row_queries=40, prior=1e-4), World(smooth(4))
    together = world.errors(attack)
    monkeypatch.setattr("splitfed.attacks.reconstruction.query_inversion.LARGEST", 1)
    assert torch.allclose(world.errors(attack), together, rtol=1e-2, atol=1e-7)


def test_updates_between_jacobians_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With queries for one Jacobian and eleven steps, steps by a Jacobian that stays as it was end farther off."""
    client = nn.Sequential(nn.Linear(WIDTH, 8), nn.Softplus(beta=4), nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)
    attack = QueryInversion(row_queries=10, prior=0.0)
    updated = float(World(client).errors(attack).mean())
    monkeypatch.setattr("splitfed.attacks.reconstruction.query_inversion._Jacobians.update", lambda *given: None)
    assert updated < 0.8 * float(World(client).errors(attack).mean())


def test_releases_that_differ_are_refused() -> None:
    drawn = torch.Generator().manual_seed(0)
    world = World(lambda x: x + torch.rand(x.shape, generator=drawn))
    assert not is_repeatable(world.query, world.known)
    with pytest.raises(InvalidInput, match=r"^query_inversion needs the same release of a row in every query; here"):
        world.errors(QueryInversion(row_queries=30))
    by_batch = World(lambda x: x - x.mean(0))
    assert not is_repeatable(by_batch.query, by_batch.known)
    with pytest.raises(InvalidInput, match=r"^query_inversion needs the same release"):
        lenet_run(Noise(scale=1.0)).attack(QueryInversion(row_queries=30), floors=False)


def test_a_server_without_weights_finds_rows_of_a_run() -> None:
    (result,) = lenet_run().attack(QueryInversion(row_queries=300, prior=0.0), floors=False)
    assert result.threat_model == "black_box"
    assert result.scores["attack"]["psnr"].median > 60
