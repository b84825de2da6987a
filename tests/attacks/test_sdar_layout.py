"""SDAR in the client's own layout, and with the authors' networks: weights, modes, draws, state, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.training_time.attack_networks import evaluation_mode
from splitfed.attacks.training_time.sdar import Sdar, Simulator
from splitfed.attacks.training_time.sdar_networks import CutCritic, ReleaseEnd, SdarCritic, SdarDecoder
from splitfed.attacks.training_time.training_attack import Seen
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator, stream
from splitfed.data.dataset import Federation
from splitfed.defenses import Noise
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from tests.attacks.training_time_examples import attack_state, error, go, ramps
from tests.examples import assert_same

TINY = Sdar.with_budget("full", width=4, blocks=1)


@cache
def images() -> Federation:
    """192 training rows of real digits, 8x8."""
    found = splitfed.data.digits().clients(1, auxiliary=64, victims=8, validation=0.0, test=0.0)
    (client,) = found.clients
    return replace(found, clients=(replace(client, train=client.train.rows(torch.arange(192))),))


def convolutional() -> nn.Sequential:
    """Batch normalisation in the client ("0"), in the server ("1") and none in the head."""
    with stream(0):
        bottom = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        middle = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())
        return nn.Sequential(bottom, middle, nn.Linear(12, 10))


def run_on_images(plan: Sdar = TINY, shape: str = "vanilla", rounds: int = 1, **changes: Any) -> Run:
    net = convolutional()
    topology = vanilla(net, "0") if shape == "vanilla" else u_shaped(net, ("0", "1"))
    return splitfed.train(
        topology,
        images(),
        rounds=rounds,
        batch_size=32,
        adversaries=splitfed.Adversaries(training_attacks={"server": plan}),
        **changes,
    )


def simulator(run: Run) -> Simulator:
    found = attack_state(run)
    assert isinstance(found, Simulator)
    return found


@pytest.mark.exhaustive
def test_in_the_clients_layout_it_reads_victims_that_nobody_trained_on() -> None:
    plan = Sdar.with_budget("quick", layout="client")
    run = go(plan, rounds=24, rate=3e-3)
    (result,) = run.attack(plan)
    prediction, mean = error(run, result.prediction)
    assert prediction < mean / 2


def test_simulator_and_head_have_the_clients_layouts_and_weights_of_their_own() -> None:
    run = run_on_images(shape="u_shaped", seed=3)
    mine, theirs = simulator(run), run.engine.modules(0)
    for net, segment in (("simulator", "bottom"), ("head", "head")):
        own, client = list(mine.nets[net].state_dict().values()), list(theirs[segment].state_dict().values())
        assert [t.shape for t in own] == [t.shape for t in client]
    first, true = next(mine.nets["simulator"].parameters()), next(theirs["bottom"].parameters())
    assert not torch.allclose(first, true, atol=0.01)
    # One round at a rate of .001 is not enough to move that far from where the client began.
    assert not torch.allclose(first, next(convolutional().parameters()), atol=0.05)
    other = simulator(run_on_images(shape="u_shaped", seed=4))
    assert not torch.allclose(first, next(other.nets["simulator"].parameters()), atol=0.05)


class Normed(nn.Module):
    """16 features, normalised as they come, then two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 2))
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two scores a row."""
        found: Tensor = self.last(self.first(x))
        return found


def test_it_learns_from_rows_as_the_client_gets_them_in_training_mode() -> None:
    """Two passes over the same rows: running means, from zero, at a momentum of .1: (1 - .9^2) of the rows' mean."""
    topology = vanilla(Normed(), "first")
    run = splitfed.train(
        topology,
        ramps(1, 32),
        rounds=1,
        batch_size=32,
        adversaries=splitfed.Adversaries(training_attacks={"server": TINY}),
    )
    mine = simulator(run)
    known = mine.site.knowledge.auxiliary
    assert known is not None
    rows = mine.site.draw_rows(32, generator(mine.site.seed, "draws", 0))
    mean = next(t for name, t in mine.nets["simulator"].named_buffers() if name.endswith("running_mean"))
    assert torch.allclose(mean, 0.19 * known[rows].mean(0), atol=1e-6)


@pytest.mark.parametrize("shape", ["vanilla", "u_shaped"])
def test_resumed_it_ends_in_the_same_bits_with_its_statistics(shape: str, tmp_path: Path) -> None:
    class Stop(Exception):
        """Stands for a crash."""

    def progress(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
        if done == 1:
            raise Stop

    changes: dict[str, Any] = {"shape": shape, "rounds": 2, "defenses": [Noise(scale=0.1)]}
    whole = run_on_images(**changes)
    with pytest.raises(Stop):
        run_on_images(logging=splitfed.Logging(folder=tmp_path / "run", progress=progress), **changes)
    again = run_on_images(logging=splitfed.Logging(folder=tmp_path / "run", resume=True), **changes)
    states = simulator(again).state()
    assert_same(states, simulator(whole).state())
    for net in ("simulator", "decoder", "simulator_critic", "decoder_critic"):
        assert any(name.endswith("running_var") for name in states["nets"][net])
    assert torch.equal(again.attack(TINY)[0].prediction, whole.attack(TINY)[0].prediction)


def test_a_guess_depends_on_its_own_row_alone_and_changes_no_mode() -> None:
    run = run_on_images()
    every, few = (
        run.attack(TINY, victims=rows)[0].prediction
        for rows in (images().victims, images().victims.rows(torch.arange(3)))
    )
    assert torch.allclose(every[:3], few, atol=1e-5)
    assert all(net.training for net in simulator(run).nets.values())
    assert all(module.training for module in simulator(run).nets["decoder"].modules())


def test_a_net_is_put_back_into_its_mode_even_where_it_fails() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    with evaluation_mode(net):
        assert torch.equal(net(torch.ones(1, 2)), net[1](torch.ones(1, 2)))
    assert net.training
    with pytest.raises(RuntimeError), evaluation_mode(net):
        net(torch.ones(1, 3))
    assert net.training
    assert net[0].training


def test_its_releases_pass_the_defenses_and_every_draw_has_a_number() -> None:
    mine = simulator(run_on_images(defenses=[Noise(scale=0.5)]))
    x = images().auxiliary.x
    with torch.no_grad():
        one, two, other = (mine.nets["simulator"](x, number) for number in (7, 7, 8))
    assert torch.equal(one, two)
    assert float((one - other).std()) == pytest.approx(0.5 * 2**0.5, rel=0.05)


def test_a_step_of_one_row_teaches_normalised_networks_nothing() -> None:
    run = run_on_images()
    mine = simulator(run)
    before = mine.state()["nets"]
    mine.learn(Seen(torch.randn(1, 4, 4, 4), torch.zeros(1)), run.engine.parties["server"].state.modules, generator(0))
    assert_same(mine.state()["nets"], before)


class Loose(nn.Module):
    """A weight that nobody says how to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return x, scaled."""
        return x * self.scale


def small(bottom: nn.Module, top: nn.Module) -> nn.Sequential:
    return nn.Sequential(bottom, nn.Linear(2, 2), top)


LINEAR = nn.Linear(16, 2)
REFUSED: dict[str, tuple[nn.Sequential, str, Sdar, str]] = {
    "weights that cannot be drawn": (
        small(nn.Sequential(LINEAR, Loose()), nn.Identity()),
        "vanilla",
        TINY,
        "weight '0.1.scale' of segment 'bottom' belongs to no module with reset_parameters",
    ),
    "no weights": (
        nn.Sequential(nn.Flatten(), nn.Linear(16, 2)),
        "vanilla",
        TINY,
        "sdar layout='client' needs segments with weights upstream; these have none",
    ),
    "a head that cannot be drawn": (small(LINEAR, Loose()), "u_shaped", TINY, "Sdar needs architecture of the head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(case: str) -> None:
    net, shape, plan, text = REFUSED[case]
    topology = vanilla(net, "0", sent_inputs=("input",)) if shape == "vanilla" else u_shaped(net, ("0", "1"))
    with pytest.raises(InvalidInput) as caught:
        splitfed.train(
            topology, ramps(1, 64), rounds=1, adversaries=splitfed.Adversaries(training_attacks={"server": plan})
        )
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    # The generic layout needs nothing of the kind.
    splitfed.train(
        topology, ramps(1, 64), rounds=1, adversaries=splitfed.Adversaries(training_attacks={"server": Sdar(width=4)})
    )


def test_weights_that_nothing_flows_through_stay_where_they_are() -> None:
    class Spare(nn.Module):
        """Two layers, one of which is not used."""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(16, 2), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            """Return two numbers a row."""
            found: Tensor = self.used(x)
            return found

    topology = vanilla(small(Spare(), nn.Identity()), "0")
    run = splitfed.train(
        topology, ramps(1, 64), rounds=1, adversaries=splitfed.Adversaries(training_attacks={"server": TINY})
    )
    optimizer = simulator(run).nets.optimizers["simulator"]
    moved = [weight.shape for weight in optimizer.param_groups[0]["params"] if optimizer.state[weight]]
    assert moved == [(2, 16), (2,)]


def convolutions(net: nn.Module) -> list[tuple[int, int]]:
    """Outputs and stride of each, in order."""
    return [(m.out_channels, m.stride[0]) for m in net.modules() if isinstance(m, nn.Conv2d)]


TAIL = [(16, 1)] * 3 + [(3, 1)]
# Cuts at their levels 3, 4 and 7 -> convolutions of the decoder and of the simulator's critic.
AUTHORS: dict[tuple[int, ...], tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    (16, 32, 32): (TAIL, [(32, 1), (64, 2), (128, 2), (256, 1), (256, 1), (256, 1), (256, 2)]),
    (32, 16, 16): ([(32, 1), *TAIL], [(64, 1), (128, 2), (256, 1), (256, 1), (256, 1), (256, 2)]),
    (64, 8, 8): ([(64, 1), (32, 1), (32, 1), (32, 1), *TAIL], [(128, 1), (256, 1), (256, 1), (256, 1), (256, 2)]),
}


@pytest.mark.parametrize("cut", AUTHORS)
def test_on_images_the_networks_are_the_authors(cut: tuple[int, ...]) -> None:
    decoder, critic = SdarDecoder(cut, (3, 32, 32), 64, 3, 10, bounded=True), CutCritic(cut, 64, 3, 10)
    assert (convolutions(decoder), convolutions(critic)) == AUTHORS[cut]
    assert convolutions(SdarCritic((3, 32, 32), 64, 10)) == [(64, 1), (128, 2), (128, 2), (256, 2)]
    # Every convolution but the last of the decoder, and all but the first and the last of a critic.
    norms = [sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) for net in (decoder, critic)]
    assert norms == [len(AUTHORS[cut][0]) - 1, len(AUTHORS[cut][1]) - 2]


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 9, 7), (1, 8, 8)])
@pytest.mark.parametrize("cut", [(4, 7, 7), (2, 1, 1), (5, 12, 12)])
@pytest.mark.parametrize("classes", [None, 3])
def test_cuts_of_any_size_are_reached(image: tuple[int, ...], cut: tuple[int, ...], classes: int | None) -> None:
    z, y = torch.randn(2, *cut), None if classes is None else torch.tensor([0, 2])
    found = SdarDecoder(cut, image, 4, 1, classes, bounded=True)(z, y).detach()
    assert found.shape == (2, *image)
    assert float(found.abs().max()) <= 1
    assert CutCritic(cut, 4, 1, classes)(z, y).shape == SdarCritic(image, 4, classes)(found, y).shape == (2,)


def test_the_end_of_a_generic_simulator_by_hand() -> None:
    """Values 1 and 3 of a channel, and 0 and 0 of another: -1 and 1, of which the ReLU leaves 0 and 1, and zeros."""
    end, z = ReleaseEnd((2, 1, 1)), torch.tensor([[1.0, 0.0], [3.0, 0.0]]).view(2, 2, 1, 1)
    end.observe(z)
    assert torch.allclose(end(z), torch.tensor([[0.0, 0.0], [1.0, 0.0]]).view(2, 2, 1, 1), atol=1e-4)
    kept = end.state_dict()
    end.observe(torch.tensor([[0.5, -1e-6]]))
    end.observe(z)
    assert torch.equal(end(-z), -z)
    end.load_state_dict(kept)
    assert float(end(z).detach().min()) == 0.0


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 4, 4)])
def test_it_ends_a_cut_of_any_shape(shape: tuple[int, ...]) -> None:
    z = 3 + 2 * torch.randn(64, *shape, generator=generator(0, "end"))
    found = ReleaseEnd(shape)(z).detach()
    assert found.shape == z.shape
    # Of a normal variable the ReLU leaves a mean of .399.
    assert torch.allclose(found.transpose(0, 1).flatten(1).mean(1), torch.full((shape[0],), 0.399), atol=0.15)


def test_a_generic_simulator_releases_what_may_arrive() -> None:
    """Behind a ReLU nothing negative, and something that is zero; where negative numbers arrive it ends linearly."""
    plan = Sdar.with_budget("quick", width=8)
    behind, linear = simulator(run_on_images(plan)), simulator(go(plan))
    with torch.no_grad():
        made = behind.client(images().auxiliary.x, 0)
        assert float(made.min()) == 0.0
        assert 0.1 < float((made == 0).float().mean()) < 0.9
    assert linear.end is not None
    assert bool(linear.end.signed)
    assert simulator(run_on_images(TINY)).end is None
