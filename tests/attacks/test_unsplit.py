"""UnSplit: inverts and steals a shallow cut without data, and what it is given holds nothing that was trained."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Knowledge
from splitfed.attacks.reconstruction.inversion import misfit
from splitfed.attacks.reconstruction.unsplit import Unsplit, stretch_rows
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator, stream
from splitfed.defenses import Noise
from splitfed.models.lenet import lenet
from splitfed.threats.attack_result import AttackResult
from splitfed.threats.fresh_segments import Architecture
from splitfed.threats.segment_runner import SegmentRunner
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from tests.attacks.examples import digits as federation, lenet_run
from tests.examples import InPlaceAfterCut, Scale, toy_data
from tests.object_graph import holdings, reachable

QUICK = Unsplit(rounds=1, input_steps=2, model_steps=2, restarts=1)


def trained(*defenses: Defense) -> Run:
    return lenet_run(*defenses, rounds=10)


@cache
def toy(shape: str) -> Run:
    with stream(0):
        model = InPlaceAfterCut()
    topology = vanilla(model, "conv") if shape == "vanilla" else u_shaped(model, ("conv", "fc1"))
    return splitfed.train(topology, toy_data(60).clients(1, auxiliary=20, victims=8), rounds=1)


@cache
def attacked() -> AttackResult:
    (result,) = trained().attack(Unsplit(rounds=12))
    return result


def architecture(run: Run) -> Architecture:
    drawn = run.evaluator.grants.knowledge("server", 0, 1).architecture
    assert isinstance(drawn, Architecture)
    return drawn


def test_shows_structure_that_the_mean_image_has_not() -> None:
    scores = attacked().scores
    assert scores["attack"]["ssim"].mean > scores["mean_image"]["ssim"].mean + 0.3


def test_steals_the_upstream() -> None:
    stolen = attacked().stolen
    assert stolen is not None
    accuracy = {who: found["accuracy"].mean for who, found in stolen.items()}
    assert accuracy["trained"] == pytest.approx(trained().accuracy, abs=1e-12)
    assert accuracy["clone"] > accuracy["fresh"] + 0.3
    assert stolen["trained"]["agreement"].mean == 1.0
    assert stolen["clone"]["agreement"].mean > stolen["fresh"]["agreement"].mean + 0.3


def test_fit_and_prior_choose_among_restarts() -> None:
    """More restarts keep the least loss of a longer list that begins with the same clones."""
    run = trained()
    view, knowledge = run.observe(), run.evaluator.grants.knowledge("server", 0, 1)
    losses = []
    for restarts in (1, 2, 3, 4):
        attack = Unsplit(rounds=2, restarts=restarts, stretch=False)
        with torch.enable_grad():
            found = attack.run(view, knowledge, generator(0), lambda done, total: None)
        assert found.clone is not None
        with torch.no_grad():
            fit = float(misfit(found.clone(found.prediction), view.tensors()))
        losses.append(fit + attack.prior(found.prediction, (0.0, 1.0)))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


class Mirrored:
    """A client of one invertible layer, and clones of it by turns: one that fits negatives, by weights of the other
    sign, all of them added to the biases, and its own, with the first `dead` numbers of a release left out.
    """  # fmt: skip

    def __init__(self, dead: int) -> None:
        self.weight = 3 * nn.init.orthogonal_(torch.empty(64, 64), generator=generator(0, "mirrored"))
        self.dead, self.draws = dead, 0

    def release(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T

    def __call__(self, seed: int) -> Any:
        self.draws += 1
        layer = nn.Linear(64, 64)
        layer.weight.data, layer.bias.data = self.weight.clone(), torch.zeros(64)
        layer.weight.data[: self.dead] = 0.0
        if self.draws % 2:
            layer.weight.data, layer.bias.data = -self.weight, self.weight.sum(1)
        return Drawn(layer)


class Drawn:
    """A clone of one layer behind flattened rows."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        return {"z": self.layer(x.flatten(1))}

    sample = __call__

    def parameters(self) -> Any:
        return self.layer.parameters()


def mirrored(restarts: int, dead: int) -> tuple[Tensor, Tensor]:
    """Return digits, and what the attack makes of their releases by so many clones."""
    x, client = federation().victims.x[:8], Mirrored(dead)
    seen = View("server", (Message("client0", "server", "activation", "a->b", {"z": client.release(x)}, STAMP),))
    knowledge = Knowledge((1, 8, 8), (0.0, 1.0), architecture=client)
    attack = Unsplit(rounds=1, input_steps=150, model_steps=1, lr=0.05, model_lr=1e-6, l2=0.2, restarts=restarts)
    return x, attack(seen, knowledge, generator(0)).prediction


STAMP = Stamp("predict", 0, 0, 0)


def test_a_negative_that_fits_better_is_not_chosen() -> None:
    """The first clone gives negatives, and fits exactly; the second gives the digits, and fits less well."""
    truth, negative = mirrored(1, dead=1)
    assert float((1 - negative - truth).abs().mean()) < 0.05
    truth, prediction = mirrored(2, dead=1)
    assert float((prediction - truth).abs().mean()) < 0.1


def test_a_picture_that_does_not_fit_is_not_chosen_for_its_prior() -> None:
    truth, prediction = mirrored(2, dead=32)
    assert float((1 - prediction - truth).abs().mean()) < 0.05


def test_the_prior_by_hand() -> None:
    """Spread, both rows are 0 and 1: total variation 1, mean square 1/2. As it is, 16 and 29 in the second."""
    x = torch.tensor([[[[0.0, 1.0]]], [[[3.0, 7.0]]]])
    attack = Unsplit(tv=10.0, l2=100.0)
    assert attack.prior(x, (-5.0, 9.0)) == pytest.approx(2 * (10 + 50))
    assert attack.prior(x, None) == pytest.approx(10 * (1 + 16) + 100 * (0.5 + 29))


def test_same_seed_same_guess() -> None:
    one, two, other = (trained().attack(QUICK, seed=s)[0].prediction for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_architecture_is_that_of_the_upstream() -> None:
    """With the trained weights in it, it computes what arrives."""
    run = trained()
    drawn = architecture(run)(3)
    assert not torch.allclose(drawn(federation().victims.x)["relu1"], run.observe().tensors()["relu1"], atol=1e-2)
    drawn.modules["bottom"].load_state_dict(run.engine.modules(0)["bottom"].state_dict())
    assert torch.allclose(drawn(federation().victims.x)["relu1"], run.observe().tensors()["relu1"], atol=1e-6)


def test_weights_come_from_the_seed() -> None:
    draw = architecture(trained())
    one, two, other = (draw(seed).modules["bottom"].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not any(torch.equal(one[n], other[n]) for n in one)


def test_defenses_are_drawn_in_samples_alone() -> None:
    drawn = architecture(trained(Noise(scale=0.5)))(0)
    x = federation().auxiliary.x
    with torch.no_grad():
        mean = drawn(x)["relu1"]
        first, second = (drawn.sample(x)["relu1"] - mean for _ in range(2))
    assert torch.equal(mean, drawn(x)["relu1"])
    assert float(first.std()) == pytest.approx(0.5, rel=0.02)
    assert float((first - second).std()) == pytest.approx(0.5 * 2**0.5, rel=0.02)


@pytest.mark.parametrize("shape", ["vanilla", "u_shaped"])
def test_nothing_trained_can_be_reached(shape: str) -> None:
    run = toy(shape)
    draw = architecture(run)
    model = run.engine.modules(0)
    for start in (draw, draw(1)):
        own = holdings(start)
        assert any(kind == "memory" for kind, _ in own)
        assert not own & holdings(list(run.engine.parties.values()))
        assert not any(kind == "data" for kind, _ in own)
        kept = [t for t in reachable(start) if isinstance(t, Tensor) and t.numel()]
        for secret in [*model.values(), *(s.module for s in run.engine.topology.segments)]:
            for weight in secret.parameters():
                assert not any(t.shape == weight.shape and torch.equal(t, weight) for t in kept)


def test_segments_of_its_own_keep_their_weights() -> None:
    """A server that has two turns knows what it does between them; the client's pieces are drawn anew."""
    with stream(0):
        model = lenet((1, 8, 8), 10, seed=None)
    topology = u_shaped(model, ("relu1", "pool1", "conv2", "fc1"))
    run = splitfed.train(topology, toy_data(60).clients(1, victims=8, auxiliary=8), rounds=1)
    drawn, held = architecture(run)(0), run.engine.modules(0)
    assert set(drawn.modules) == {"bottom", "middle1", "between1"}
    assert drawn.modules["middle1"] is not held["middle1"]
    first, true = (m["bottom"].get_parameter("conv1.weight") for m in (drawn.modules, held))
    assert not torch.equal(first, true)
    (result,) = run.attack(QUICK)
    assert result.prediction.shape == (8, 1, 8, 8)


def test_a_u_shaped_server_can_steal_too() -> None:
    (result,) = toy("u_shaped").attack(QUICK)
    assert isinstance(result.clone, SegmentRunner)
    assert result.stolen is not None
    assert result.stolen["trained"]["accuracy"].mean == pytest.approx(toy("u_shaped").accuracy, abs=1e-12)


def test_stretched_by_hand() -> None:
    """1 2 3 spread over 0 to 1 is 0 .5 1; a constant row has nothing to spread."""
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    assert stretch_rows(x, (0.0, 1.0)).tolist() == [[0.0, 0.5, 1.0], [2.0, 2.0, 2.0]]
    assert stretch_rows(x, (-1.0, 1.0))[0].tolist() == [-1.0, 0.0, 1.0]
    assert torch.equal(stretch_rows(x, None), x)


def test_misfit_by_hand() -> None:
    """Row errors (1 + 9) / 2 and 0 in one value, 4 and 0 in the other: 9 in all."""
    seen = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 1)}
    found = {"a": torch.tensor([[1.0, 3.0], [0.0, 0.0]]), "b": torch.tensor([[2.0], [0.0]])}
    assert float(misfit(found, seen)) == 9.0


def test_the_budget_paper_is_the_authors() -> None:
    made = Unsplit.with_budget("full")
    assert (made.rounds, made.input_steps, made.model_steps, made.restarts) == (1000, 100, 100, 1)
    assert (made.lr, made.model_lr, made.tv, made.l2, made.stretch) == (1e-3, 1e-3, 0.1, 1.0, True)
    assert Unsplit.with_budget("quick") == Unsplit()


def run_of(bottom: nn.Module) -> Run:
    model = nn.Sequential()
    model.add_module("bottom", bottom)
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(64, 10))
    # Behind a layer without weights the input crosses, which is allowed here.
    topology = vanilla(model, "bottom", sent_inputs=("input",))
    return splitfed.train(topology, toy_data(60).clients(1, victims=8, auxiliary=8), rounds=1)


def test_weights_that_nobody_can_draw_are_refused() -> None:
    with pytest.raises(InvalidInput, match="a fresh copy cannot be drawn"):
        run_of(Scale()).attack(QUICK)


def test_an_upstream_without_weights_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs an upstream with weights to search; this one has none: use rmle"):
        run_of(nn.Tanh()).attack(QUICK)


def test_a_party_that_receives_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="owns the inputs of client 0: there is nothing to reconstruct"):
        toy("vanilla").attack(QUICK, adversary="client0")
