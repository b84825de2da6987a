"""PCAT: a pseudo-client that learns from the honest server alone; late start, frozen server, matched labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.base import Target
from splitfed.attacks.training_time.pcat import Pcat, PseudoClient, same_labels
from splitfed.attacks.training_time.training_attack import Seen
from splitfed.core.defense import ReleaseDefense
from splitfed.core.defense_context import Context
from splitfed.core.random import generator
from splitfed.defenses import Noise
from splitfed.training.run import Run
from tests.attacks.test_attacks_adapt import Tied
from tests.attacks.training_time_examples import attack_state, error, go
from tests.examples import assert_same

PLAN = Pcat.with_budget("quick")
SMALL: dict[str, Any] = {"width": 8, "inverse_steps": 5, "refine": 2}


@cache
def trained(plan: Pcat = PLAN) -> Run:
    return go(plan, rounds=40, rate=3e-3)


def pseudo(run: Run) -> PseudoClient:
    found = attack_state(run)
    assert isinstance(found, PseudoClient)
    return found


def test_it_reads_victims_that_nobody_trained_on() -> None:
    (result,) = trained().attack(PLAN)
    prediction, mean = error(trained(), result.prediction)
    assert prediction < 0.7 * mean


@pytest.mark.exhaustive
def test_the_refinement_alone_reads_victims_where_the_release_tells_all() -> None:
    """The client is tied to an invertible map; the inverse has had one step, so that it knows nothing."""
    errors = {}
    for refine in (0, 300):
        plan = Pcat.with_budget("quick", start=0, inverse_steps=1, refine=refine, refine_lr=0.02)
        run = tied(plan)
        (result,) = run.attack(plan)
        errors[refine], mean = error(run, result.prediction)
    assert errors[300] < 0.3 * mean
    assert errors[0] > 0.9 * mean


@cache
def tied(plan: Pcat) -> Run:
    return go(plan, rounds=15, rate=3e-3, width=16, defenses=[Tied()])


def test_it_learns_from_rows_with_the_labels_that_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step, row by row."""
    wanted: list[Tensor] = []
    drawn: list[Tensor] = []
    learn, follow = PseudoClient.learn, PseudoClient._follow

    def watched(self: PseudoClient, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> None:
        assert seen.y is not None
        wanted.append(seen.y)
        learn(self, seen, modules, random)

    def followed(self: PseudoClient, rows: Tensor, number: int) -> Tensor:
        drawn.append(rows)
        return follow(self, rows, number)

    monkeypatch.setattr(PseudoClient, "learn", watched)
    monkeypatch.setattr(PseudoClient, "_follow", followed)
    run = go(Pcat(start=0, **SMALL))
    assert len(wanted) == len(drawn) == 8
    for labels, rows in zip(wanted, drawn, strict=True):
        assert torch.equal(run.data.auxiliary.y[rows], labels)


def test_it_steals_the_function() -> None:
    """Pseudo-client and server together classify victims; the majority is right on about half of them."""
    run = trained()
    client, victims = pseudo(run), run.data.victims
    scores = client.classify(run.observe("server"), victims.x)
    assert float((scores.argmax(1) == victims.y).float().mean()) > 0.9
    assert float(victims.y.float().mean()) == pytest.approx(0.5, abs=0.1)


@dataclass(frozen=True, kw_only=True)
class Shift(ReleaseDefense):
    """Adds five to all that leaves; `jitter` more or less in a draw."""

    jitter: float = 0.0

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z + 5 + self.jitter * (2 * context.stamp.step % 4 - 1)

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z + 5


def test_the_refinement_knows_the_defenses_mean() -> None:
    """It ends at rows whose release, five added, is what arrived; one that forgot the five would end five away."""
    run = go(Pcat(start=0, refine_lr=0.05, refine=400, width=8), defenses=[Shift(jitter=0.1)])
    client = pseudo(run)
    with torch.no_grad():
        z = client.nets["client"].net(torch.rand(6, 16)) + 5
    found = client._refine(torch.zeros(6, 16), z, generator(0))
    with torch.no_grad():
        assert float((client.nets["client"].net(found) + 5 - z).abs().max()) < 0.05


def test_the_refinement_stays_in_the_range_of_values() -> None:
    """Rows that nothing in the range releases as wanted end at its edge."""
    client = pseudo(go(Pcat(start=0, refine_lr=0.5, refine=20, width=8, inverse_steps=5)))
    found = client._refine(torch.zeros(6, 16), torch.full((6, 2), 1e3), generator(0)).detach()
    assert found.abs().amax(1).tolist() == [1.0] * 6


def test_noise_drowns_it() -> None:
    plan = Pcat.with_budget("quick", start=0)
    run = go(plan, rounds=6, defenses=[Noise(scale=1e3)])
    (result,) = run.attack(plan)
    prediction, mean = error(run, result.prediction)
    assert prediction > 0.9 * mean


def test_it_starts_late() -> None:
    """A round has eight steps: after a start of eight the first round has taught nothing, after seven it has."""
    fresh, late, early = (pseudo(go(Pcat(start=n, **SMALL))) for n in (100, 8, 7))
    assert_same(late.state()["nets"], fresh.state()["nets"])
    assert late.metrics() == {}
    names = early.state()["nets"]["client"]
    assert any(not torch.equal(t, fresh.state()["nets"]["client"][n]) for n, t in names.items())


def test_it_learns_from_the_segments_as_they_were_when_the_rows_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every step of the server, not behind it: what it learns from is what the last step left."""
    met: list[Tensor] = []
    left: list[Tensor] = []

    def weights(modules: Mapping[str, nn.Module]) -> Tensor:
        return torch.cat([p.detach().flatten() for m in modules.values() for p in m.parameters()])

    def learn(self: PseudoClient, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> None:
        assert len(seen.z) == 32
        assert seen.y is not None
        met.append(weights(modules))

    def ended(self: PseudoClient) -> None:
        left.append(weights(self.site.modules(0)))

    monkeypatch.setattr(PseudoClient, "learn", learn)
    monkeypatch.setattr(PseudoClient, "step_ended", ended)
    go(Pcat(**SMALL))
    assert len(met) == len(left) == 8
    for before, after in pairwise([met[0], *left]):
        assert not torch.equal(before, after)
    for found, wanted in zip(met[1:], left, strict=False):
        assert torch.equal(found, wanted)


def test_the_paper_variant_leaves_all_to_the_end() -> None:
    run = go(Pcat(after=20, start=0, **SMALL))
    client = pseudo(run)
    fresh = pseudo(go(Pcat(start=100, **SMALL)))
    assert_same(client.state()["nets"], fresh.state()["nets"])
    view = run.observe("server")
    once, twice = (client.predict(view, Target.INPUTS) for _ in range(2))
    assert torch.equal(once, twice)
    assert not torch.equal(once, fresh.predict(view, Target.INPUTS))
    assert_same(client.state()["nets"], fresh.state()["nets"])


def test_the_servers_own_segments_stay_as_they_are() -> None:
    run = go(Pcat(start=0, **SMALL))
    own = run.engine.parties["server"].state.modules
    kept = {n: {k: t.clone() for k, t in m.state_dict().items()} for n, m in own.items()}
    pseudo(run).learn(Seen(torch.randn(8, 2), torch.zeros(8)), own, generator(0))
    assert_same({n: dict(m.state_dict()) for n, m in own.items()}, kept)
    assert all(p.grad is None for m in own.values() for p in m.parameters())


def test_a_head_learns_beside_it_where_no_labels_arrive() -> None:
    assert set(pseudo(go(Pcat(start=0, **SMALL), "u_shaped")).nets) == {"client", "head"}
    assert set(pseudo(go(Pcat(start=0, **SMALL))).nets) == {"client"}


def test_rows_are_drawn_with_the_labels_that_arrived() -> None:
    labels, wanted = torch.tensor([0, 1, 1, 2, 0, 1]), torch.tensor([1, 0, 2, 1, 2, 0]).repeat(20)
    found = same_labels(labels, wanted, generator(0))
    assert torch.equal(labels[found], wanted)
    assert set(found.tolist()) == set(range(6))
    missing = same_labels(labels, torch.full((200,), 7), generator(0))
    assert set(missing.tolist()) == set(range(6))
