"""SDAR: a passive server reads victims and labels; who is updated by what; what it does without its regularisers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.networks.substitute_client import class_scores, loss_of
from splitfed.attacks.training_time.insider_labels import InsiderLabels
from splitfed.attacks.training_time.sdar import Sdar, Simulator
from splitfed.attacks.training_time.training_attack import Seen
from splitfed.core.random import generator
from splitfed.defenses import Noise
from splitfed.training.run import Run
from tests.attacks.training_time_examples import attack_state, error, go, mirror, ramps
from tests.examples import assert_same
from tests.rounding import single

PLAN = Sdar.with_budget("quick")


@cache
def trained(shape: str = "vanilla", plan: Sdar = PLAN) -> Run:
    return go(plan, shape, rounds=40, rate=3e-3)


def test_it_reads_victims_that_nobody_trained_on() -> None:
    (result,) = trained().attack(PLAN)
    prediction, mean = error(trained(), result.prediction)
    assert prediction < mean / 2


@pytest.mark.exhaustive
def test_in_a_u_it_reads_labels_that_never_left_the_client() -> None:
    (result,) = trained("u_shaped").attack(InsiderLabels())
    assert result.scores["attack"]["accuracy"].mean > 0.85
    assert result.scores["majority"]["accuracy"].mean < 0.6


BOTH = Sdar.with_budget("quick", l1=0.2)


def test_labels_and_the_critic_together_find_what_neither_finds_alone() -> None:
    """Where every row has its negative: .03 to .29 of the mean row's at five seeds; .60 to .78 without a critic."""
    run = go(BOTH, rounds=12, rate=3e-3, data=mirror(), seed=1)
    (result,) = run.attack(BOTH)
    prediction, mean = error(run, result.prediction)
    assert prediction < 0.4 * mean


class Brightness(nn.Module):
    """A critic that takes the bright for real, `sharpness` times as surely as the mean pixel is high."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(sharpness))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        found: Tensor = self.sharpness * x.flatten(1).mean(1)
        return found


Z, Y = torch.randn(32, 2, generator=generator(0)), torch.zeros(32)


def pleased(critic: str, sharpness: float, **weight: float) -> Simulator:
    """The attack after fifteen steps on Z with labels Y under a fixed `critic` that weighs more than all else."""
    run = go(Sdar.with_budget("quick", width=8, **weight))
    attacker = attack_state(run)
    assert isinstance(attacker, Simulator)
    attacker.nets.add(critic, Brightness(sharpness), 1e-9)
    for step in range(15):
        attacker.learn(Seen(Z, Y), run.engine.parties["server"].state.modules, generator(0, step))
    return attacker


def test_the_decoder_pleases_its_critic() -> None:
    """Decoded releases get brighter where the critic wants that, darker where it wants the contrary."""
    one, other = (pleased("decoder_critic", sharpness, l2=100.0).nets["decoder"] for sharpness in (1.0, -1.0))
    assert one(Z, Y.long()).mean().item() > other(Z, Y.long()).mean().item() + 0.2


def test_the_simulator_pleases_its_critic() -> None:
    """Simulated releases rise where their critic takes high numbers for real, and fall where it takes low ones."""
    one, other = (pleased("simulator_critic", sharpness, l1=100.0).client for sharpness in (1.0, -1.0))
    x = ramps().auxiliary.x
    assert one(x, 0).mean().item() > other(x, 0).mean().item() + 0.2


def test_noise_drowns_it() -> None:
    run = go(PLAN, rounds=6, defenses=[Noise(scale=1e3)])
    (result,) = run.attack(PLAN)
    prediction, mean = error(run, result.prediction)
    assert prediction > 0.9 * mean


def states(simulator: Simulator) -> dict[str, Any]:
    found: dict[str, Any] = simulator.state()["nets"]
    return found


@pytest.mark.parametrize(
    ("shape", "changes", "nets"),
    [
        ("vanilla", {}, {"simulator", "decoder", "simulator_critic", "decoder_critic"}),
        ("vanilla", {"l1": 0.0}, {"simulator", "decoder", "decoder_critic"}),
        ("vanilla", {"l1": 0.0, "l2": 0.0}, {"simulator", "decoder"}),
        ("u_shaped", {}, {"simulator", "decoder", "simulator_critic", "decoder_critic", "head"}),
    ],
)
def test_every_net_learns_in_one_step_and_the_servers_own_does_not(
    shape: str, changes: dict[str, float], nets: set[str]
) -> None:
    run = go(Sdar(**changes), shape)  # type: ignore[arg-type]
    simulator = attack_state(run)
    assert isinstance(simulator, Simulator)
    own = run.engine.parties["server"].state.modules
    before, kept = states(simulator), {n: {k: t.clone() for k, t in m.state_dict().items()} for n, m in own.items()}
    labels = torch.zeros(8) if shape == "vanilla" else None
    simulator.learn(Seen(torch.randn(8, 2), labels), own, generator(0))
    after = states(simulator)
    assert set(after) == nets
    for name in nets:
        assert any(not torch.equal(after[name][k], before[name][k]) for k in before[name]), name
    assert_same({n: dict(m.state_dict()) for n, m in own.items()}, kept)
    assert all(p.grad is None for m in own.values() for p in m.parameters())


def test_the_critics_rates_are_those_of_what_they_judge_times_the_weights() -> None:
    simulator = attack_state(go(Sdar(lr=0.5, decoder_lr=0.25, l1=0.1, l2=0.01)))
    rates = {name: found.param_groups[0]["lr"] for name, found in simulator.nets.optimizers.items()}
    expected = {"simulator": 0.5, "decoder": 0.25, "simulator_critic": 0.05, "decoder_critic": 0.0025}
    assert rates == pytest.approx(expected)


def test_flipped_labels_are_drawn_from_all_classes() -> None:
    """Every label drawn anew from two classes: about half of them change; none at a share of zero."""
    for share, low, high in ((1.0, 0.45, 0.55), (0.4, 0.15, 0.25), (0.0, 0.0, 0.0)):
        simulator = attack_state(go(Sdar(flip=share), "u_shaped"))
        assert isinstance(simulator, Simulator)
        changed = float(simulator._flip_labels(torch.zeros(4000, dtype=torch.long), generator(0)).float().mean())
        assert low <= changed <= high


def test_losses_and_likely_classes_of_one_logit_and_of_several() -> None:
    logit, pair = torch.tensor([[2.0], [-1.0]]), torch.tensor([[0.0, 2.0], [0.0, -1.0]])
    y = torch.tensor([1, 0])
    assert float(loss_of(logit, y)) == single(float(loss_of(pair, y)))
    assert torch.equal(class_scores(logit), pair)
    assert class_scores(pair) is pair


def test_the_authors_settings() -> None:
    plan = Sdar.with_budget("full")
    assert (plan.lr, plan.decoder_lr, plan.l1, plan.l2, plan.flip) == (1e-3, 5e-4, 0.02, 1e-5, 0.2)
    assert (plan.layout, plan.normalise, plan.width, plan.blocks) == ("client", True, 64, 3)
