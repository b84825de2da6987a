"""Shadow: an upstream trained from labels alone inverts releases, and the downstream loss it uses is the run's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn import functional

import splitfed
from splitfed.attacks.base import Knowledge
from splitfed.attacks.reconstruction.shadow import Shadow
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.models.mlp import mlp
from splitfed.threats.attack_result import AttackResult
from splitfed.threats.released_rows import score_stolen_model
from splitfed.topologies import multi_hop, vanilla, vertical
from tests.attacks.examples import digits as federation
from tests.attacks.test_unsplit import toy, trained
from tests.examples import InPlaceAfterCut, assert_same, toy_data

QUICK = Shadow(epochs=1, iterations=2)


@cache
def attacked() -> AttackResult:
    (result,) = trained().attack(Shadow(), seed=1)
    return result


def knowledge_of(run: splitfed.Run, party: str = "server") -> Knowledge:
    return run.evaluator.grants.knowledge(party, 0, 1)


def test_inverts_without_queries() -> None:
    """Between .7 and 2.5 dB above the mean image over four seeds; structure shows more than error."""
    scores = [attacked().scores, trained().attack(Shadow(), seed=2)[0].scores]
    gain = [one["attack"]["psnr"].mean - one["mean_image"]["psnr"].mean for one in scores]
    assert sum(gain) / 2 > 1.0
    assert min(gain) > 0.3
    for one in scores:
        assert one["attack"]["ssim"].mean > one["mean_image"]["ssim"].mean + 0.3


def test_the_shadow_suits_the_downstream_segments() -> None:
    stolen = attacked().stolen
    assert stolen is not None
    assert stolen["trained"]["accuracy"].mean == pytest.approx(trained().accuracy, abs=1e-12)
    assert stolen["clone"]["accuracy"].mean > stolen["fresh"]["accuracy"].mean + 0.3


def test_wrong_labels_teach_the_shadow_nothing() -> None:
    """With labels dealt out at random the model with the shadow is right as often as chance, a tenth, and no more."""
    run = trained()
    known = knowledge_of(run)
    assert known.auxiliary_labels is not None
    dealt = known.auxiliary_labels[torch.randperm(400, generator=generator(0))]
    outcome = Shadow(iterations=1)(run.observe(), replace(known, auxiliary_labels=dealt), generator(1))
    stolen = score_stolen_model(run.evaluator.grants, outcome.clone, "server", 0, 0)
    assert stolen is not None
    assert stolen["clone"]["accuracy"].mean < 0.3


def test_the_loss_is_that_of_the_run() -> None:
    run, rows = trained(), federation().auxiliary
    known = knowledge_of(run)
    assert known.loss is not None
    assert known.upstream is not None
    found = known.loss(rows.x, known.upstream(rows.x), rows.y)
    assert float(found) == pytest.approx(float(functional.cross_entropy(run.predict(rows.x), rows.y)), rel=1e-5)


def test_the_loss_uses_what_the_party_feeds_itself() -> None:
    """The label party of a vertical run has columns of its own, which do not arrive."""
    data = toy_data(80).halves().clients(1, auxiliary=20, victims=8)
    shapes = {name: feature.shape for name, feature in data.features.items()}
    bottoms = {name: mlp(shape, 6, (8,)) for name, shape in shapes.items()}
    label_party = list(shapes)[-1]
    run = splitfed.train(vertical(bottoms, torch.nn.Linear(12, 10), labels=label_party), data, rounds=1)
    party = next(name for name, p in run.engine.parties.items() if p.state.modules and p.role == _head_role(run))
    known = knowledge_of(run, party)
    assert known.loss is not None
    assert known.upstream is not None
    x, y = data.auxiliary.x, data.auxiliary.y
    found = known.loss(x, known.upstream(x), y)
    assert float(found) == pytest.approx(float(functional.cross_entropy(run.predict(x), y)), rel=1e-5)


def _head_role(run: splitfed.Run) -> str:
    return run.engine.topology.heads[0].role


def test_the_adversarys_segments_stay_as_they_are() -> None:
    run = toy("vanilla")
    before = {n: t.clone() for n, t in run.engine.modules(0)["top"].state_dict().items()}
    known = knowledge_of(run)
    assert known.loss is not None
    assert known.architecture is not None
    x, y = run.data.auxiliary.x, run.data.auxiliary.y
    clone = known.architecture(0)
    known.loss(x, clone(x), y).backward()
    assert all(p.grad is not None for p in clone.parameters())
    run.attack(QUICK)
    assert_same(dict(run.engine.modules(0)["top"].state_dict()), before)
    assert all(p.grad is None for p in run.engine.modules(0)["top"].parameters())


REFUSED = "Shadow needs own segments from the releases to a loss on the main labels; this run does not"


def test_a_u_shaped_server_is_refused() -> None:
    with pytest.raises(InvalidInput, match=REFUSED):
        toy("u_shaped").attack(QUICK)


def test_a_hop_before_the_server_is_refused_and_the_server_is_not() -> None:
    data = toy_data(60).clients(1, auxiliary=20, victims=8)
    run = splitfed.train(multi_hop(InPlaceAfterCut(), ("conv", "fc1")), data, rounds=1)
    with pytest.raises(InvalidInput, match=REFUSED):
        run.attack(QUICK, adversary="hop1")
    (result,) = run.attack(QUICK, adversary="server")
    assert result.prediction.shape == (8, 1, 8, 8)


def test_missing_auxiliary_data_is_named() -> None:
    data = toy_data(60).clients(1, auxiliary=0, victims=8)
    run = splitfed.train(vanilla(InPlaceAfterCut(), "conv"), data, rounds=1)
    with pytest.raises(InvalidInput, match="Shadow needs auxiliary data, labels of the auxiliary data; this run"):
        run.attack(QUICK)


def test_an_upstream_without_weights_is_refused() -> None:
    model = torch.nn.Sequential()
    model.add_module("flat", torch.nn.Flatten())
    model.add_module("fc", torch.nn.Linear(64, 10))
    topology = vanilla(model, "flat", sent_inputs=("input",))
    run = splitfed.train(topology, toy_data(60).clients(1, victims=8, auxiliary=8), rounds=1)
    with pytest.raises(InvalidInput, match="needs an upstream with weights to train; this one has none: use rmle"):
        run.attack(QUICK)


def test_the_budget_paper_is_the_authors() -> None:
    made = Shadow.with_budget("full")
    assert (made.epochs, made.batch_size, made.shadow_lr) == (50, 32, 1e-3)
    assert (made.iterations, made.lr, made.tv, made.l2) == (500, 0.1, 2.0, 0.0)
    assert Shadow.with_budget("quick") == Shadow()
