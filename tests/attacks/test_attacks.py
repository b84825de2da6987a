"""What holds for every reconstruction: what it is given, what it is not, and what it leaves behind.

Real digits, one client, LeNet cut after its first ReLU. That attacks succeed and fail where they must stands in
`tests.attacks.test_every_attack`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.inversion import total_variation
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.core.defense import Defense
from splitfed.core.messages import View
from splitfed.core.random import generator
from splitfed.defenses import Noise
from splitfed.training.run import AttackResult, Run
from tests.attacks.examples import digits as federation, lenet_run as trained
from tests.examples import assert_same
from tests.object_graph import reachable

TABLE: dict[str, Attack] = {
    "inverse_network": InverseNetwork(epochs=15, batch_size=16, queries=3, width=16),
    "rmle": Rmle(iterations=200, tv=1e-3),
}
# The same with less work, where how much they find does not matter.
QUICK: dict[str, Attack] = {
    "inverse_network": InverseNetwork(epochs=2, batch_size=16, queries=2, width=16),
    "rmle": Rmle(iterations=20, tv=1e-3),
}


@cache
def attacked(name: str) -> AttackResult:
    (result,) = trained().attack(TABLE[name])
    return result


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TABLE)
def test_structural_similarity_agrees(name: str) -> None:
    result = attacked(name)
    floors = {"linear_inverse", "nearest_1", "nearest_10", "oracle_nearest_row"}
    assert set(result.scores) == {"attack", "mean_image", "random_pairing"} | floors
    similar = {who: result.scores[who]["ssim"].mean for who in result.scores}
    assert similar["attack"] > 0.8
    assert max(similar["mean_image"], similar["random_pairing"]) < 0.4


@pytest.mark.parametrize("name", TABLE)
def test_a_result_holds_guess_truth_and_time(name: str) -> None:
    result = attacked(name)
    assert result.adversary == "server"
    assert result.prediction.shape == result.truth.shape == (24, 1, 8, 8)
    assert torch.equal(result.truth, federation().victims.x)
    assert float(result.prediction.min()) >= 0.0
    assert float(result.prediction.max()) <= 1.0
    assert result.seconds > 0


@dataclass(frozen=True)
class Spy(Attack):
    """Keeps what it was given; guesses zeros."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES})
    seen: ClassVar[list[tuple[View, Knowledge]]] = []

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        self.seen.append((view, knowledge))
        return torch.zeros(len(view.messages[0].tensors["relu1"]), *knowledge.shape) - 1.0


@pytest.fixture
def spied() -> Iterator[tuple[View, Knowledge]]:
    Spy.seen.clear()
    (result,) = trained().attack(Spy())
    assert float(result.prediction.min()) == 0.0, "the base brings a guess into the range of the data"
    yield Spy.seen[0]
    Spy.seen.clear()


def test_what_is_not_required_is_hidden(spied: tuple[View, Knowledge]) -> None:
    view, knowledge = spied
    assert (knowledge.auxiliary, knowledge.query, knowledge.upstream) == (None, None, None)
    assert (knowledge.shape, knowledge.value_range) == ((1, 8, 8), (0.0, 1.0))
    assert {(m.kind, m.receiver, m.stamp.phase) for m in view.messages} == {("activation", "server", "predict")}
    assert set(view.segments) == {"top"}


def test_the_truth_cannot_be_reached_from_view_and_knowledge(spied: tuple[View, Knowledge]) -> None:
    victims = federation().victims
    tensors = [t for t in reachable(list(spied)) if isinstance(t, Tensor)]
    assert len(tensors) > 5
    for t in tensors:
        assert t.shape != victims.x.shape or not torch.equal(t, victims.x)
        assert t.shape != victims.y.shape or not torch.equal(t, victims.y)


def test_the_adversarys_segments_are_copies(spied: tuple[View, Knowledge]) -> None:
    held = trained().engine.parties["server"].state.modules["top"]
    assert_same(dict(spied[0].segments["top"].state_dict()), dict(held.state_dict()))
    assert spied[0].segments["top"] is not held


@pytest.mark.parametrize("name", TABLE)
def test_same_generator_same_guess(name: str) -> None:
    attack = QUICK[name]
    one, two, other = (trained().attack(attack, seed=s)[0].prediction for s in (5, 5, 6))
    assert torch.equal(one, two)
    if name == "inverse_network":
        assert not torch.equal(one, other)


@pytest.mark.parametrize("name", TABLE)
def test_an_attack_changes_nothing(name: str) -> None:
    run = trained()
    parties, random = run.state(), torch.get_rng_state()
    trained_bytes = run.bytes
    run.attack(QUICK[name])
    after = run.state()
    assert_same({k: v for k, v in after.items() if k != "run"}, {k: v for k, v in parties.items() if k != "run"})
    assert torch.equal(torch.get_rng_state(), random)
    assert run.bytes == trained_bytes


def test_victims_and_auxiliary_rows_are_disjoint_and_nobody_trained_on_either() -> None:
    sources = federation().sources
    rows = torch.cat(list(sources.values()))
    assert len(torch.unique(rows)) == len(rows) == 1797
    assert (len(sources["victims"]), len(sources["auxiliary"])) == (24, 400)


def knowledge_of(*defenses: Defense) -> tuple[Run, Knowledge]:
    run = trained(*defenses)
    return run, run.evaluator.grants.knowledge("server", 0, 1)


def test_known_weights_give_what_arrives() -> None:
    run, knowledge = knowledge_of()
    assert knowledge.upstream is not None
    seen = run.observe().tensors()["relu1"]
    assert torch.allclose(knowledge.upstream(federation().victims.x)["relu1"], seen, atol=1e-6)


def test_queries_go_through_the_defense_afresh_and_known_weights_give_its_mean() -> None:
    _, knowledge = knowledge_of(Noise(scale=0.5))
    assert knowledge.query is not None
    assert knowledge.upstream is not None
    x = federation().auxiliary.x
    mean = knowledge.upstream(x)["relu1"]
    first, second = (knowledge.query(x)["relu1"] - mean for _ in range(2))
    assert float(first.std()) == pytest.approx(0.5, rel=0.02)
    assert float((first - second).std()) == pytest.approx(0.5 * 2**0.5, rel=0.02)


def psnr(run: Run) -> float:
    (result,) = run.attack(TABLE["inverse_network"])
    return result.scores["attack"]["psnr"].mean


@pytest.mark.exhaustive
def test_noise_lowers_what_is_recovered() -> None:
    found = [psnr(trained(Noise(scale=s, relative=True))) for s in (0.0, 0.5, 1.0, 2.0)]
    assert all(more > less + 0.5 for more, less in pairwise(found)), found


def test_victims_are_searched_independently() -> None:
    """One by one they end where they end together, to float tolerance."""
    run, knowledge = knowledge_of()
    view, attack = run.observe(), Rmle(iterations=60, tv=1e-3)
    together = attack(view, knowledge, generator(0)).prediction
    (message,) = view.messages
    for i in range(3):
        part = {name: t[i : i + 1] for name, t in message.tensors.items()}
        one = View(
            "server", (type(message)(message.sender, "server", "activation", message.edge, part, message.stamp),)
        )
        assert torch.allclose(attack(one, knowledge, generator(0)).prediction[0], together[i], atol=1e-3), i


def test_total_variation_by_hand() -> None:
    """Rows 0 1 / 0 3: down (0, 2) gives a mean of 2, across (1, 3) one of 5; two such rows give 14."""
    x = torch.tensor([[0.0, 1.0], [0.0, 3.0]]).view(1, 1, 2, 2).repeat(2, 1, 1, 1)
    assert float(total_variation(x)) == 14.0
    assert float(total_variation(torch.rand(3, 5))) == 0.0
    assert float(total_variation(torch.full((2, 1, 4, 4), 0.3))) == 0.0
