"""Membership attacks: who the candidates are, what a copy of the model may know, and what is refused.

60 real digits, half of them with labels drawn at random, learnt by heart; 60 others that nobody trained on. Blind
scores have an AUC of .5 with a standard deviation of .053, so .66 is three of them above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Attack, Knowledge, Needs, Progress, Target
from splitfed.attacks.membership.lira import Lira
from splitfed.attacks.membership.membership_releases import MembershipReleases
from splitfed.attacks.membership.membership_shadow import MembershipShadow, features
from splitfed.attacks.membership.membership_threshold import MembershipThreshold
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import classification, regression
from splitfed.data.candidates import candidates
from splitfed.data.dataset import Dataset
from splitfed.defenses import DistanceCorrelation, Noise
from splitfed.models.mlp import mlp
from splitfed.threats.retraining import Rerun, fresh
from splitfed.topologies import multi_task, u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.attacks.examples import (
    MEMBER_BATCH as BATCH,
    MEMBER_ROUNDS as ROUNDS,
    by_heart as trained,
    noted as federation,
)
from tests.examples import Scale, assert_same, toy_data
from tests.object_graph import holdings, reachable
from tests.rounding import single


@cache
def result(attack: Attack) -> splitfed.AttackResult:
    (found,) = trained().attack(attack)
    return found


def area(found: splitfed.AttackResult) -> float:
    return found.scores["attack"]["auc"].mean


@pytest.mark.parametrize("attack", [MembershipThreshold(), MembershipShadow(copies=1, epochs=4, batch_size=BATCH)])
def test_falls_to_chance_when_weights_may_not_grow(attack: Attack) -> None:
    (found,) = trained(decay=1.0).attack(attack)
    assert 0.34 < area(found) < 0.66


def test_the_likelihood_ratio_beats_the_threshold() -> None:
    assert area(result(Lira(copies=6))) > area(result(MembershipThreshold()))


def test_a_result_holds_scores_and_who_was_a_member() -> None:
    found = result(MembershipThreshold())
    assert found.prediction.shape == found.truth.shape == (120,)
    assert found.truth.dtype == torch.bool
    assert int(found.truth.sum()) == 60
    assert found.seconds > 0


def test_another_seed_draws_another_order_and_the_same_seed_the_same() -> None:
    attack = MembershipThreshold()
    one, two, other = (trained().attack(attack, seed=s)[0] for s in (5, 5, 6))
    assert torch.equal(one.prediction, two.prediction)
    assert torch.equal(one.truth, two.truth)
    assert not torch.equal(one.truth, other.truth)


def test_candidates_are_balanced_from_all_clients_and_never_auxiliary() -> None:
    data = toy_data(200)
    split = data.clients(2, auxiliary=40, victims=30)
    rows, members = candidates(split, split.victims, generator(0))
    assert (len(rows), int(members.sum())) == (60, 30)

    def among(part: Dataset, chosen: Tensor) -> Tensor:
        return (chosen[:, None].flatten(2) == part.x[None].flatten(2)).all(2).any(1)

    assert torch.equal(among(split.victims, rows.x), ~members)
    clients = [among(client.train, rows.x) for client in split.clients]
    assert torch.equal(clients[0] | clients[1], members)
    assert all(bool(found.any()) for found in clients)
    assert not bool(among(split.auxiliary, rows.x).any())


def test_no_more_candidates_than_the_smaller_side_has() -> None:
    split = toy_data(100).clients(1, auxiliary=0, victims=90, validation=0.0, test=0.0)
    rows, members = candidates(split, split.victims, generator(0))
    assert (len(rows), int(members.sum())) == (20, 10)


@dataclass(frozen=True)
class Spy(Attack):
    """Keeps what it was given; says the same of everybody."""

    target: ClassVar[Target] = Target.MEMBERS
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.CANDIDATES, Needs.AUXILIARY})
    seen: ClassVar[list[tuple[View, Knowledge]]] = []

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        assert knowledge.candidates is not None
        self.seen.append((view, knowledge))
        return torch.zeros(len(knowledge.candidates))


@pytest.fixture
def spied() -> Iterator[tuple[View, Knowledge, splitfed.AttackResult]]:
    Spy.seen.clear()
    (found,) = trained().attack(Spy())
    yield *Spy.seen[0], found
    Spy.seen.clear()


def test_membership_cannot_be_reached_from_view_and_knowledge(
    spied: tuple[View, Knowledge, splitfed.AttackResult],
) -> None:
    view, knowledge, found = spied
    assert (knowledge.predict, knowledge.imitate, knowledge.model) == (None, None, None)
    tensors = [t for t in reachable([view, knowledge]) if isinstance(t, Tensor)]
    assert len(tensors) > 5
    assert not any(t.shape == found.truth.shape and t.dtype == torch.bool for t in tensors)
    assert found.scores["attack"]["auc"].mean == 0.5, "ties count half"
    # The view is that of the candidates, in their order.
    top = view.segments["top"].eval()
    assert knowledge.candidates is not None
    predicted = trained().predict(knowledge.candidates)
    with torch.no_grad():
        assert torch.allclose(top(view.tensors()["relu2"]), predicted, atol=1e-5)


def test_an_attack_changes_nothing() -> None:
    run = trained()
    parties, random, crossed = run.state(), torch.get_rng_state(), run.bytes
    for attack in (Lira(copies=4, epochs=1), MembershipReleases(epochs=1)):
        run.attack(attack)
    after = run.state()
    assert_same({k: v for k, v in after.items() if k != "run"}, {k: v for k, v in parties.items() if k != "run"})
    assert torch.equal(torch.get_rng_state(), random)
    assert run.bytes == crossed


def imitation(run: Run, seed: int, epochs: int | None = 1, batch_size: int | None = BATCH) -> Rerun:
    imitate = run.evaluator.grants.knowledge("server", 0, 0).imitate
    assert imitate is not None
    copy = imitate(federation().auxiliary.x, federation().auxiliary.y, epochs, batch_size, seed)
    assert isinstance(copy, Rerun)
    return copy


def test_a_copy_learns_from_weights_of_its_own() -> None:
    x, y = federation().auxiliary.x, federation().auxiliary.y
    one, two, other = (imitation(trained(), seed) for seed in (1, 1, 2))
    assert torch.equal(one.predict(x), two.predict(x))
    assert not torch.equal(one.predict(x), other.predict(x))
    longer = imitation(trained(), 1, epochs=ROUNDS)
    right = [float((copy.predict(x).argmax(1) == y).double().mean()) for copy in (one, longer)]
    assert right[1] > right[0] + 0.3
    assert torch.equal(imitation(trained(), 1, None, None).predict(x), longer.predict(x)), "as the run was trained"


def test_no_trained_weight_can_be_reached_from_a_copy() -> None:
    run = trained()
    theirs = holdings([party.state.modules for party in run.engine.parties.values()])
    mine = holdings([party.state.modules for party in imitation(run, 1)._engine.parties.values()])
    assert len(mine) > 4
    assert not mine & theirs


def test_copies_are_trained_under_the_runs_defenses() -> None:
    """Without noise in training the same copy would come out, and without a penalty."""
    x = federation().auxiliary.x
    plain = imitation(trained(), 1).predict(x)
    assert not torch.allclose(imitation(trained(Noise(scale=1e3)), 1).predict(x), plain, atol=1.0)
    topology = trained().engine.topologies[0]
    engine = type(trained().engine)(
        topology, trained().engine.facts, 1, defenses=[DistanceCorrelation(alpha=0.9)], optims=trained().engine.optims
    )
    penalised = Rerun(engine, 0, trained().evaluator.grants.feed(0), 1)
    penalised.train(x, federation().auxiliary.y, 1, BATCH)
    assert not torch.equal(penalised.predict(x), plain)


def test_fresh_weights_are_drawn_as_the_modules_draw_them() -> None:
    topology = trained().engine.topologies[0]
    one, two, other = (fresh(topology, seed).state_dict() for seed in (1, 1, 2))
    assert_same(dict(one), dict(two))
    assert all(not torch.equal(one[n], other[n]) for n in one)
    assert all(float(w.abs().max()) <= w.shape[-1] ** -0.5 for n, w in one.items() if n.endswith("weight"))


def test_features_by_hand() -> None:
    """Logits (log 1, log 2, log 5): probabilities 1/8, 2/8, 5/8; the true one is 2/8, its odds 1/3."""
    (found,) = features(torch.tensor([[1.0, 2.0, 5.0]]).log(), torch.tensor([1])).tolist()
    logs = torch.tensor([1 / 3, 2 / 8, 5 / 8, 1 / 8]).log().tolist()
    assert found == single([*logs, 0.0, 1.0, 0.0])


def test_a_server_that_never_sees_an_output_can_still_tell() -> None:
    """The middle of a U has releases only."""
    with stream(0):
        model = mlp((1, 8, 8), 10, (64, 32), seed=None)
    run = splitfed.train(
        u_shaped(model, ("relu1", "relu2")),
        federation(),
        rounds=ROUNDS,
        batch_size=BATCH,
        optimizer=Optim("Adam", {"lr": 3e-3}),
        evaluation=splitfed.Evaluation(every=ROUNDS),
    )
    (found,) = run.attack(MembershipReleases(epochs=5))
    assert found.adversary == "server"
    assert found.prediction.shape == (120,)


@pytest.mark.parametrize("attack", [MembershipThreshold(), MembershipShadow(), MembershipReleases(), Lira(copies=4)])
def test_parts_of_rows_at_two_parties_and_a_single_logit(attack: Attack) -> None:
    data = splitfed.data.breast_cancer().vertical(2)
    bottoms = {
        name: nn.Sequential(nn.Linear(len(part.positions), 8), nn.ReLU()) for name, part in data.features.items()
    }
    run = splitfed.train(vertical(bottoms, nn.Linear(16, 1), labels="party0"), data.clients(1, victims=20), rounds=1)
    (found,) = run.attack(attack)
    assert found.prediction.shape == (40,)
    assert bool(torch.isfinite(found.prediction).all())


def test_budgets_are_the_authors_numbers_of_copies() -> None:
    assert Lira.with_budget("full") == Lira(copies=256, pooled=False)
    assert MembershipShadow.with_budget("full").copies == 100


def toy_run(data: Dataset | None = None, model: nn.Module | None = None, **parts: Any) -> Run:
    split = (data or toy_data(60)).clients(1, **{"auxiliary": 10, "victims": 10, **parts})
    return splitfed.train(vanilla(model or mlp((1, 8, 8), 10, (8,)), "relu1"), split, rounds=1)


@pytest.mark.parametrize("attack", [MembershipShadow(), MembershipReleases(), Lira()])
def test_missing_auxiliary_rows_are_named(attack: Attack) -> None:
    with pytest.raises(
        InvalidInput, match=f"{type(attack).__name__} needs auxiliary data, labels of the auxiliary data"
    ):
        toy_run(auxiliary=0).attack(attack)


def test_without_auxiliary_rows_the_threshold_still_runs() -> None:
    assert toy_run(auxiliary=0).attack(MembershipThreshold())[0].prediction.shape == (20,)


def test_too_few_auxiliary_rows_for_two_halves() -> None:
    with pytest.raises(InvalidInput, match="needs at least 4 auxiliary rows, to train on half; found 3"):
        toy_run(auxiliary=3).attack(MembershipShadow())


def test_without_outsiders_there_is_nothing_to_compare() -> None:
    with pytest.raises(InvalidInput, match="there are no victims to attack: set some aside"):
        toy_run(victims=0).attack(MembershipThreshold())


def test_a_party_that_receives_no_release_can_still_ask_the_model() -> None:
    run = toy_run()
    assert run.attack(MembershipThreshold(), adversary="client0")[0].prediction.shape == (20,)
    with pytest.raises(InvalidInput, match="MembershipReleases needs releases; this run does not grant that"):
        run.attack(MembershipReleases(), adversary="client0")


@pytest.mark.parametrize("attack", [MembershipThreshold(), MembershipShadow(), MembershipReleases(), Lira()])
def test_a_regression_has_no_confidence(attack: Attack) -> None:
    toy = toy_data(60)
    data = Dataset("numbers", toy.x, toy.y.float(), regression(), toy.value_range)
    with pytest.raises(InvalidInput, match="needs labels with classes; those of this run have none"):
        toy_run(data, mlp((1, 8, 8), 1, (8,))).attack(attack)


def test_a_model_that_cannot_be_drawn_anew_is_refused() -> None:
    model = mlp((1, 8, 8), 10, (8,))
    model.append(Scale())
    with pytest.raises(
        InvalidInput,
        match=r"weight '.*weight' of segment 'top' belongs to no module with reset_parameters: a fresh copy cannot",
    ):
        toy_run(model=model).attack(Lira())


def test_a_model_of_several_label_sets_is_not_copied() -> None:
    data = toy_data(60).with_target("odd", toy_data(60).y % 2, classification(2))
    topology = multi_task(
        {"client": nn.Sequential(nn.Flatten(), nn.Linear(64, 8))},
        {"s1": nn.Linear(8, 10), "s2": nn.Linear(8, 2)},
        targets={"s1": None, "s2": "odd"},
    )
    run = splitfed.train(topology, data.clients(1, auxiliary=10, victims=10), rounds=1)
    assert run.attack(MembershipThreshold(), adversary="s1_0")[0].prediction.shape == (20,)
    with pytest.raises(InvalidInput, match="'multi_task' learns several label sets; a copy needs just the main one"):
        run.attack(Lira(), adversary="s1_0")


def test_a_batch_norm_needs_two_rows_of_a_copy() -> None:
    model = nn.Sequential()
    for name, module in (
        ("flat", nn.Flatten()), ("fc", nn.Linear(64, 8)), ("norm", nn.BatchNorm1d(8)), ("out", nn.Linear(8, 10)),
    ):  # fmt: skip
        model.add_module(name, module)
    split = toy_data(60).clients(1, auxiliary=9, victims=10)
    run = splitfed.train(vanilla(model, "norm"), split, rounds=1)
    assert run.attack(MembershipShadow(batch_size=3))[0].prediction.shape == (20,), "a last batch of one is left out"
    with pytest.raises(InvalidInput, match="rows in batches of 1 are too few for a copy: it needs 2"):
        run.attack(MembershipShadow(batch_size=1))
