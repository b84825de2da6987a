"""Attackers that train a client of their own train it with the loss of a defended one: task weighed, penalties added.

The world: a defense ties what the client sends to a public linear map of its input. Who trains with that term learns
the map; who trains with the task alone learns something that classifies as well and releases otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Attack
from splitfed.attacks.networks.substitute_client import ClientModel, GenericLayout, SameLayout
from splitfed.attacks.reconstruction.shadow import Shadow
from splitfed.attacks.training_time.pcat import Pcat, PseudoClient
from splitfed.attacks.training_time.sdar import Sdar
from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.core.annealing import Linear
from splitfed.core.defense import PenaltyDefense
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.defenses import Adversarial, DistanceCorrelation, Mid, Noise
from splitfed.stats.dependence import distance_correlation, u_distance_correlation_sqr
from splitfed.training.run import Run
from tests.attacks.test_sdar_layout import run_on_images
from tests.attacks.training_time_examples import attack_state, error, go, ramps
from tests.examples import assert_same


@dataclass(frozen=True, kw_only=True)
class Tied(PenaltyDefense):
    """Adds `weight` times the mean squared distance of what leaves from a public map of the raw input."""

    weight: float = 10.0

    def penalty(self, z: Tensor, context: Context) -> Tensor:
        (x,) = context.inputs.values()
        return self.weight * functional.mse_loss(z, x @ public_map(z.shape[1]))


@cache
def public_map(width: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(16, width), generator=generator(0, "public map"))


WORLDS: dict[str, tuple[Attack, dict[str, Any]]] = {
    "sdar": (Sdar.with_budget("quick", l1=0.0, l2=0.0), {}),
    "sdar, client's layout": (Sdar.with_budget("quick", l1=0.0, l2=0.0, layout="client"), {}),
    "pcat": (Pcat.with_budget("quick", refine=0, start=0), {}),
    "shadow": (Shadow(epochs=40, tv=0.0), {"width": 16}),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_term_of_the_defense_makes_the_attack(name: str) -> None:
    """With it the error is a fraction of the mean row's, without it above that."""
    attack, changes = WORLDS[name]
    run = go(attack if isinstance(attack, TrainingAttack) else None, rounds=15, rate=3e-3, defenses=[Tied()], **changes)
    (result,) = run.attack(attack)
    prediction, mean = error(run, result.prediction)
    assert prediction < 0.6 * mean


MEASURES = {"biased": distance_correlation, "unbiased": u_distance_correlation_sqr}
FALLING = Linear(0.8, 0.2, epochs=3)  # .8, .6, .4, .2


def gradients(loss: Tensor, weights: list[nn.Parameter]) -> Tensor:
    return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)])


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())


def pseudo_client(run: Run) -> ClientModel:
    found = attack_state(run)
    assert isinstance(found, PseudoClient)
    return found.client


@pytest.mark.parametrize("statistic", MEASURES)
@pytest.mark.parametrize("layout", ["client", "generic"])
def test_the_loss_is_that_of_the_defended_client(layout: str, statistic: str) -> None:
    """(1 - alpha) times any task, and alpha times the distance correlation of raw rows and release, in each epoch."""
    run = go(Pcat(width=8, layout=layout), defenses=[DistanceCorrelation(alpha=FALLING, statistic=statistic)])
    client = pseudo_client(run)
    weights, x = [p for p in client.parameters() if p.requires_grad], ramps().auxiliary.x[:32]
    for epoch, alpha in enumerate((0.8, 0.6, 0.4, 0.2)):
        imitated = client.in_training(x, 0, epoch)
        found = gradients(imitated.loss(imitated.release.square().sum()), weights)
        again = client(x, 0)
        wanted = (1 - alpha) * again.square().sum() + alpha * MEASURES[statistic](x, again)
        assert_near(found, gradients(wanted, weights))
        assert imitated.weight == pytest.approx(1 - alpha)
        assert_near(gradients(imitated.penalty, weights), gradients(alpha * MEASURES[statistic](x, again), weights))


def test_the_shadow_weighs_it_as_the_last_epoch_did() -> None:
    """Three rounds are the epochs 0, 1 and 2: alpha is .4 in the last."""
    run = go(None, rounds=3, defenses=[DistanceCorrelation(alpha=FALLING)])
    drawn = run.evaluator.grants.knowledge("server", 0, 1).architecture
    assert drawn is not None
    clone, x = drawn(3), ramps().auxiliary.x[:32]
    releases, penalty, weight = clone.in_training(x)
    assert weight == pytest.approx(0.6)
    weights = list(clone.parameters())
    (z,) = releases.values()
    wanted = gradients(0.4 * distance_correlation(x, z), weights)
    assert_near(gradients(penalty, weights), wanted)


@pytest.mark.parametrize("layout", ["client", "generic"])
def test_a_client_without_such_defenses_has_the_loss_of_its_task(layout: str) -> None:
    run = go(Pcat(width=8, layout=layout), defenses=[Noise(scale=0.1)])
    imitated = pseudo_client(run).in_training(ramps().auxiliary.x[:4], 0, 0)
    assert float(imitated.loss(torch.tensor(3.5)).detach()) == 3.5


@pytest.mark.parametrize("name", ["sdar", "pcat"])
@pytest.mark.parametrize("kind", [SameLayout, GenericLayout])
def test_the_epoch_is_that_of_the_step(name: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps a round; a course of the defense moves from epoch to epoch."""
    asked: list[int] = []
    honest = kind.in_training  # type: ignore[attr-defined]

    def spied(self: Any, x: Tensor, number: int, epoch: int) -> Any:
        asked.append(epoch)
        return honest(self, x, number, epoch)

    monkeypatch.setattr(kind, "in_training", spied)
    layout = "client" if kind is SameLayout else "generic"
    go({"sdar": Sdar(width=8, layout=layout), "pcat": Pcat(width=8, start=0, layout=layout)}[name], rounds=2)
    assert asked == [0] * 8 + [1] * 8


LEARNING = Adversarial(weight=1.0, threshold=-1.0, bottleneck=0, width=8)


@pytest.mark.parametrize("layout", ["client", "generic"])
def test_a_defense_that_learns_does_so_in_the_imitation_and_is_part_of_the_state(layout: str) -> None:
    """Six steps of 32 rows: its decoder has taken six steps of Adam; the copy's states are its own."""
    found = attack_state(run_on_images(Sdar.with_budget("quick", width=8, layout=layout), defenses=[LEARNING]))
    learnt = found.state()["defenses"]["simulator"]
    ((place, state),) = learnt.items()
    assert {float(each["step"]) for each in state["optimizer"]["state"].values()} == {6.0}
    copied = found.copy()
    assert_same(copied.state(), found.state())
    copied.nets.defenses["simulator"].load_state_dict(
        {place: {**state, "net": {name: t + 1 for name, t in state["net"].items()}}}
    )
    assert not torch.equal(copied.state()["defenses"]["simulator"][place]["net"]["0.bias"], state["net"]["0.bias"])
    assert_same(found.state()["defenses"]["simulator"], learnt)


def test_what_only_the_clients_own_segments_tell_is_named() -> None:
    with pytest.warns(UserWarning, match="pcat with layout='generic' learns without what Mid adds"):
        go(Pcat(width=8), defenses=[Mid()])
    go(Pcat(width=8, layout="client"), defenses=[Mid()])


def test_batches_too_small_for_the_defense_are_refused() -> None:
    run = go(None, defenses=[DistanceCorrelation(statistic="unbiased")])
    with pytest.raises(InvalidInput, match=r"shadow batch_size=3 with 200 auxiliary rows is not .* at least 4"):
        run.attack(Shadow(batch_size=3))
    run.attack(Shadow(epochs=1, batch_size=33, iterations=1))
