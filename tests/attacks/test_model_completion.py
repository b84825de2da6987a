"""Model completion: MixMatch by hand, planted and drowned classes, a party's own part, the malicious optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Attack, Knowledge, Progress
from splitfed.attacks.labels import model_completion
from splitfed.attacks.labels.mixmatch import MixMatch, draw_mixing_weights, endless_batches, mix, mixed_loss, sharpen
from splitfed.attacks.labels.model_completion import ModelCompletion
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import binary, regression
from splitfed.data.dataset import Dataset
from splitfed.models.mlp import mlp
from splitfed.poisoning import GradientReplacement, MaliciousOptimizer, Poisoning
from splitfed.topologies import u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.attacks.examples import three_classes
from tests.examples import assert_same, refusal
from tests.object_graph import reachable
from tests.rounding import single


def test_sharpening_by_hand() -> None:
    """Squares of .8 and .2 are .64 and .04; their shares 16/17 and 1/17."""
    found = sharpen(torch.tensor([[0.8, 0.2], [0.5, 0.5]]), 0.5)
    assert found.tolist() == [single([16 / 17, 1 / 17]), single([0.5, 0.5])]


def test_mixing_by_hand() -> None:
    rows = torch.tensor([[0.0, 4.0], [8.0, 0.0]])
    assert mix(rows, torch.tensor([1, 0]), 0.75).tolist() == [[2.0, 3.0], [6.0, 1.0]]


def test_the_loss_by_hand() -> None:
    """Even logits: ln 2 on the labelled row; (1/4 + 1/4) / 2 on the other, four times."""
    targets = torch.tensor([[0.3, 0.7], [1.0, 0.0]])
    assert float(mixed_loss(torch.zeros(2, 2), targets, 1, 4.0)) == single(math.log(2) + 1.0)


def test_mixing_strengths() -> None:
    """The greater of l and 1 - l: 3/4 in the mean where l is uniform, and near 1 where l is near either end."""
    uniform = draw_mixing_weights(1.0, 20_000, generator(0))
    assert 0.5 <= float(uniform.min()) <= float(uniform.max()) <= 1.0
    assert float(uniform.mean()) == pytest.approx(0.75, abs=0.01)
    assert float(draw_mixing_weights(0.01, 2000, generator(0)).mean()) > 0.98


def test_passes_take_every_row_once_and_leave_out_what_is_short() -> None:
    batches = list(islice(endless_batches(7, 3, generator(0)), 4))
    assert [len(b) for b in batches] == [3, 3, 3, 3]
    for first, second in (batches[:2], batches[2:]):
        assert len(torch.cat([first, second]).unique()) == 6
    assert not torch.equal(torch.cat(batches[:2]), torch.cat(batches[2:]))


def test_the_average_follows_by_hand() -> None:
    """With one class there is no gradient; a weight of 1 shrinks by .02 lr = .01 after the average has looked at it.

    The average of two steps has seen 1 and .99, and gone a quarter of the way to each.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    settings = MixMatch(2, lr=0.5, decay=0.75)
    found = settings.fit(
        model, torch.ones(2, 1), torch.zeros(2, dtype=torch.int64), torch.ones(2, 1), generator(0), told
    )
    assert model.weight.tolist() == [[pytest.approx(0.99**2)]]
    assert found.weight.tolist() == [[pytest.approx(1.0 - 0.25 * 0.01)]]
    assert not found.training


def told(done: int, total: int) -> None:
    """Nobody listens."""


SIGNAL, NUISANCE, CLASSES = 3, 12, 3


def planted(classes_matter: bool = True) -> tuple[Tensor, Tensor]:
    """Three classes in three small numbers among twelve louder ones; or classes drawn by lot."""
    random = generator(4, "planted")
    y = torch.randint(CLASSES, (420,), generator=random)
    shown = y if classes_matter else torch.randint(CLASSES, (420,), generator=random)
    signal = torch.eye(CLASSES)[shown] + 0.1 * torch.randn(420, SIGNAL, generator=random)
    return torch.cat([signal, 2 * torch.randn(420, NUISANCE, generator=random)], 1), y


def accuracy(bottom: nn.Module, x: Tensor, y: Tensor, **changes: Any) -> float:
    """Of the attack on 300 victims, with 120 auxiliary rows."""
    known = Knowledge(
        (SIGNAL + NUISANCE,),
        classes=CLASSES,
        own={"left": x[:300]},
        own_auxiliary={"left": x[300:]},
        auxiliary_labels=y[300:],
    )
    attack = ModelCompletion(**{"iterations": 150, **changes})
    prediction = attack(View("left", (), {"bottom": bottom}), known, generator(0)).prediction
    return float((prediction.argmax(1) == y[:300]).double().mean())


def trained_bottom() -> nn.Linear:
    """Keeps the three numbers that tell, as training would have it."""
    bottom = nn.Linear(SIGNAL + NUISANCE, SIGNAL, bias=False)
    with torch.no_grad():
        bottom.weight.copy_(torch.eye(SIGNAL, SIGNAL + NUISANCE))
    return bottom


@pytest.mark.parametrize("tune", [True, False])
def test_a_bottom_that_separates_classes_gives_them_away(tune: bool) -> None:
    """With four labels a class; a fresh bottom, with the same labels, knows no number from another."""
    x, y = planted()
    with stream(1):
        fresh = nn.Linear(SIGNAL + NUISANCE, SIGNAL, bias=False)
    assert accuracy(trained_bottom(), x, y, tune=tune) > 0.95
    assert accuracy(fresh, x, y, tune=tune) < 0.7


def test_labels_that_the_rows_know_nothing_of_stay_at_chance() -> None:
    """300 guesses at one in three: a standard deviation of .027."""
    assert abs(accuracy(trained_bottom(), *planted(classes_matter=False)) - 1 / 3) < 0.1


def test_the_party_keeps_its_bottom() -> None:
    bottom = trained_bottom()
    before = bottom.weight.detach().clone()
    accuracy(bottom, *planted(), iterations=5)
    assert torch.equal(bottom.weight, before)
    assert bottom.weight.requires_grad


@pytest.mark.parametrize("tune", [True, False])
def test_without_tuning_the_head_learns_alone(tune: bool) -> None:
    x, y = planted()
    model = model_completion._Completed(trained_bottom(), SIGNAL, CLASSES, tune)
    assert model.head[-1].weight.unique().tolist() == [1.0]
    settings = MixMatch(3, decay=0.0)
    found = settings.fit(model, x[300:312], y[300:312], x[:300], generator(0), told)
    assert torch.equal(found.bottom.weight, trained_bottom().weight) is not tune
    assert len(found.head[-1].weight.unique()) > 1


@cache
def run(*poisonings: Poisoning, rate: float = 0.05) -> Run:
    """Digits in halves, labels at the server."""
    with stream(0):
        bottoms = {r: nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.ReLU()) for r in ("left", "right")}
        top = nn.Linear(32, 10)
    data = splitfed.data.digits().halves().clients(1, auxiliary=150, victims=150)
    return splitfed.train(
        vertical(bottoms, top, labels="server"),
        data,
        rounds=4,
        optimizer=Optim("SGD", {"lr": rate, "momentum": 0.9}),
        adversaries=splitfed.Adversaries(poisoning=poisonings),
    )


FAST = ModelCompletion(iterations=200, decay=0.95)


@pytest.mark.parametrize("party", ["left0", "right0"])
def test_forty_labels_and_half_a_digit(party: str) -> None:
    (found,) = run().attack(FAST, adversary=party)
    assert found.prediction.shape == (150, 10)
    assert found.scores["attack"]["accuracy"].low > 0.3
    assert found.scores["majority"]["accuracy"].mean < 0.15


def test_same_generator_same_guess() -> None:
    few = ModelCompletion(iterations=3)
    one, two, other = (run().attack(few, adversary="left0", seed=s)[0].prediction for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_it_sees_its_own_part_and_no_label_of_a_victim() -> None:
    kept: list[tuple[View, Knowledge]] = []

    @dataclass(frozen=True)
    class Spy(ModelCompletion):
        def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
            kept.append((view, knowledge))
            return super().run(view, knowledge, generator, progress)

    run().attack(Spy(iterations=1), adversary="left0")
    view, knowledge = kept[0]
    data = run().data
    left, right = data.victims.features["left"], data.victims.features["right"]
    assert knowledge.own is not None
    assert knowledge.own_auxiliary is not None
    assert torch.equal(knowledge.own["left"], left.select(data.victims.x))
    assert torch.equal(knowledge.own_auxiliary["left"], left.select(data.auxiliary.x))
    assert set(knowledge.own) == set(knowledge.own_auxiliary) == {"left"}
    assert knowledge.auxiliary is None
    hidden = [data.victims.x, data.auxiliary.x, right.select(data.victims.x), right.select(data.auxiliary.x)]
    for thing in reachable([view, knowledge]):
        if isinstance(thing, Tensor):
            assert not any(thing.shape == t.shape and torch.equal(thing, t) for t in hidden)
            assert thing.shape != data.victims.y.shape or not torch.equal(thing.long(), data.victims.y)


def two_classes() -> Run:
    """A table of two classes with one logit, the first column telling."""
    random = generator(6)
    x = torch.randn(300, 4, generator=random)
    data = Dataset("table", x, (x[:, 0] > 0).long(), binary()).vertical({"left": range(2), "right": range(2, 4)})
    with stream(0):
        bottoms = {r: nn.Sequential(nn.Linear(2, 4), nn.ReLU()) for r in ("left", "right")}
    topology = vertical(bottoms, nn.Linear(8, 1), labels="server")
    return splitfed.train(topology, data.clients(1, auxiliary=60, victims=100), rounds=5)


def test_two_classes_of_one_logit() -> None:
    trained = two_classes()
    (left,), (right,) = (trained.attack(FAST, adversary=party) for party in ("left0", "right0"))
    assert left.scores["attack"]["auc"].low > 0.8
    assert (
        abs(right.scores["attack"]["auc"].mean - 0.5) < 0.15
    )  # it holds nothing that tells: .058 a standard deviation


def labels_at_left() -> Run:
    with stream(0):
        bottoms = {r: nn.Sequential(nn.Flatten(), nn.Linear(32, 4)) for r in ("left", "right")}
    data = splitfed.data.digits().halves().clients(1, victims=20)
    return splitfed.train(vertical(bottoms, nn.Linear(8, 10), labels="left"), data, rounds=1)


def whole(shape: str) -> Run:
    with stream(0):
        model = mlp((1, 8, 8), 10, (16, 16), seed=None)
    topology = vanilla(model, "relu1") if shape == "vanilla" else u_shaped(model, ("relu1", "relu2"))
    return splitfed.train(topology, splitfed.data.digits().clients(1, victims=20), rounds=1)


def real() -> Run:
    x = torch.randn(100, 4, generator=generator(1))
    data = Dataset("real", x, x[:, 0], regression()).vertical(2)
    bottoms = {r: nn.Linear(2, 2) for r in ("party0", "party1")}
    return splitfed.train(vertical(bottoms, nn.Linear(4, 1), labels="server"), data.clients(1, victims=20), rounds=1)


REFUSED: dict[str, tuple[Callable[[], Run], Attack, str, str]] = {
    "the server": (run, FAST, "server0", "party 'server0' is given the labels of 'top_out'"),
    "the label party": (labels_at_left, FAST, "left0", "party 'left0' is given the labels of 'top_out'"),
    "a server between": (
        lambda: whole("u"),
        FAST,
        "server",
        "model_completion is for a party with inputs of its own; server has none",
    ),
    "a vanilla client": (lambda: whole("vanilla"), FAST, "client0", "party 'client0' is given the labels of"),
    "a client of a U": (lambda: whole("u"), FAST, "client0", "party 'client0' is given the labels of"),
    "no classes": (real, FAST, "party0_0", "model_completion needs labels with classes; those of this run have none"),
    "too many labels": (
        run,
        ModelCompletion(labelled=100),
        "left0",
        "model_completion labelled=100 is not allowed; there are 15 auxiliary rows of class 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    made, attack, party, text = REFUSED[case]
    assert text in refusal(made().attack, attack, adversary=party)


def test_refused_by_the_attack_itself() -> None:
    x, y = planted()
    known = Knowledge((15,), classes=3, own={"a": x}, own_auxiliary={"a": x}, auxiliary_labels=y)
    view = View("left", (), {"one": trained_bottom(), "two": trained_bottom()})
    with pytest.raises(InvalidInput, match=r"one segment that reads its own input alone; left holds \['one', 'two'\]"):
        FAST(view, known, generator(0))
    several = replace(known, own={"a": x, "b": x})
    with pytest.raises(InvalidInput, match=r"model_completion reads one input; left has \['a', 'b'\]"):
        FAST(View("left", (), {"one": trained_bottom()}), several, generator(0))
    alone = replace(known, own={"a": x[:1]}, own_auxiliary={"a": torch.eye(3, 15)}, auxiliary_labels=torch.arange(3))
    with pytest.raises(InvalidInput, match="model_completion has one unlabelled row; expected two or more"):
        ModelCompletion(labelled=1)(View("left", (), {"one": trained_bottom()}), alone, generator(0))
    with pytest.raises(InvalidInput, match="ModelCompletion needs labels of the auxiliary data"):
        FAST(view, replace(known, auxiliary_labels=None), generator(0))


def test_a_poisoning_out_of_range_is_refused() -> None:
    for name, value in (("gain", 0.0), ("low", 0.0), ("high", 0.5)):
        with pytest.raises(InvalidInput, match=f"malicious_optimizer {name}={value} is not allowed"):
            MaliciousOptimizer(party="left", **{name: value})


def test_budgets() -> None:
    paper = ModelCompletion.with_budget("full")
    assert (paper.iterations, paper.decay, paper.weight, paper.temperature, paper.alpha) == (5120, 0.999, 50, 0.8, 0.75)
    assert ModelCompletion.with_budget("quick") == ModelCompletion()


def test_factors_by_hand() -> None:
    """1 + g / g', between one and five; a sign that turned is left alone, and nothing is divided by zero."""
    plan = MaliciousOptimizer(party="left")
    g, before = torch.tensor([2.0, -1.0, 10.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    assert plan.scale(g, before).tolist() == single([3.0, 1.0, 5.0, 5.0, 1.0])
    assert MaliciousOptimizer(party="left", gain=0.5).scale(g, before).tolist() == single([2.0, 1.0, 5.0, 5.0, 1.0])


def line(steps: int, *poisonings: Poisoning) -> tuple[float, float]:
    """Weights l and r of left and right after steps of rate .1 on (l + r)^2: both get the same gradient."""
    x = torch.ones(1, 2)
    data = Dataset("line", x.repeat(4, 1), torch.zeros(4), regression()).vertical({"left": [0], "right": [1]})
    bottoms = {r: nn.Linear(1, 1, bias=False) for r in ("left", "right")}
    for bottom in bottoms.values():
        nn.init.constant_(bottom.weight, 1.0)
    topology = vertical(bottoms, nn.Identity(), labels="server", fusion="sum")
    found = splitfed.train(
        topology,
        data.clients(1, auxiliary=0, victims=1, validation=0.0, test=0.0),
        rounds=steps,
        batch_size=4,
        optimizer=Optim("SGD", {"lr": 0.1}),
        adversaries=splitfed.Adversaries(poisoning=poisonings),
    )
    left, right = (found.engine.party(0, role).state.modules[f"bottom_{role}"] for role in ("left", "right"))
    return next(left.parameters()).item(), next(right.parameters()).item()


def test_two_steps_by_hand() -> None:
    """Mean squared error of l + r = 2 against 0: gradient 2 (l + r) = 4 in the first step, as anybody's.

    Then 2 (.6 + .6) = 2.4, for left 1 + 2.4 / 4 = 1.6 times that, 3.84.
    """
    bent = MaliciousOptimizer(party="left")
    assert line(1, bent) == single((0.6, 0.6))
    assert line(2, bent) == single((0.6 - 0.384, 0.6 - 0.24))
    # Third: g = 2 (.216 + .36) = 1.152, of the scaled 3.84: 1.3 times that.
    assert line(3, bent)[0] == single(0.216 - 0.1 * 1.3 * 1.152)


def test_factor_one_changes_no_bit_and_another_does() -> None:
    def weights(found: Run) -> dict[str, Any]:
        return {n: p.state.state_dict()["segments"] for n, p in found.engine.parties.items()}

    even = run(MaliciousOptimizer(party="left", high=1.0), rate=0.01)
    assert_same(weights(even), weights(run(rate=0.01)))
    bent = run(MaliciousOptimizer(party="left"), rate=0.01)
    assert 1.0 < bent.history[-1]["training_attacks"]["left0"]["factor"] < 5.0
    assert even.history[-1]["training_attacks"]["left0"]["factor"] == 1.0
    assert not torch.equal(
        next(bent.engine.party(0, "left").state.modules["bottom_left"].parameters()),
        next(even.engine.party(0, "left").state.modules["bottom_left"].parameters()),
    )


def test_the_active_attack_reads_labels() -> None:
    (found,) = run(MaliciousOptimizer(party="left"), rate=0.01).attack(FAST, adversary="left0")
    assert found.scores["attack"]["accuracy"].low > found.scores["majority"]["accuracy"].mean + 0.2


class Stop(Exception):
    """Stands for a crash."""


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    def progress(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
        if done == 1:
            raise Stop

    with stream(0):
        bottoms = {r: nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.ReLU()) for r in ("left", "right")}
        topology = vertical(bottoms, nn.Linear(8, 10), labels="server")
    data = splitfed.data.digits().halves().clients(1, auxiliary=0, victims=10)
    bent = MaliciousOptimizer(party="left")
    once = splitfed.train(topology, data, rounds=2, adversaries=splitfed.Adversaries(poisoning=bent))
    with pytest.raises(Stop):
        splitfed.train(
            topology,
            data,
            rounds=2,
            adversaries=splitfed.Adversaries(poisoning=bent),
            logging=splitfed.Logging(folder=tmp_path / "run", progress=progress),
        )
    again = splitfed.train(
        topology,
        data,
        rounds=2,
        adversaries=splitfed.Adversaries(poisoning=bent),
        logging=splitfed.Logging(folder=tmp_path / "run", resume=True),
    )
    assert_same(again.state()["party-left0"], once.state()["party-left0"])
    assert_same(again.engine.training_attacks["left0"].state(), once.engine.training_attacks["left0"].state())
    assert [h["training_attacks"] for h in again.history] == [h["training_attacks"] for h in once.history]


MISPLACED: dict[str, tuple[tuple[Poisoning, ...], str, str]] = {
    "no such party": (
        (MaliciousOptimizer(party="rigth"),),
        "server",
        "unknown party of a malicious optimizer: 'rigth'; did you mean 'right'",
    ),
    "the label party": ((MaliciousOptimizer(party="left"),), "left", "is for a party without labels; 'left' holds"),
    "twice": (
        (MaliciousOptimizer(party="left"), MaliciousOptimizer(party="left", gain=2.0)),
        "server",
        "'left0' has a training attack or poisoning already; a malicious optimizer cannot be added",
    ),
    "beside another": (
        (GradientReplacement(party="left", row=0, target=0), MaliciousOptimizer(party="left")),
        "server",
        "'left0' has a training attack or poisoning already; a malicious optimizer cannot be added",
    ),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_misplaced(case: str) -> None:
    poisonings, labels, text = MISPLACED[case]
    with stream(0):
        bottoms = {r: nn.Sequential(nn.Flatten(), nn.Linear(32, 4)) for r in ("left", "right")}
    data = splitfed.data.digits().halves().clients(1, victims=20)
    if isinstance(poisonings[0], GradientReplacement):
        poisonings = (replace(poisonings[0], target=int(data.clients[0].train.y[0])), *poisonings[1:])
    with pytest.raises(InvalidInput, match=re.escape(text)):
        splitfed.train(
            vertical(bottoms, nn.Linear(8, 10), labels=labels),
            data,
            rounds=1,
            adversaries=splitfed.Adversaries(poisoning=poisonings),
        )


def test_a_bottom_without_weights_has_no_optimizer() -> None:
    bottoms = {r: nn.Flatten() for r in ("left", "right")}
    data = splitfed.data.digits().halves().clients(1, victims=20)
    with pytest.raises(InvalidInput, match="MaliciousOptimizer changes a party's training; 'left0' trains no weight"):
        splitfed.train(
            vertical(bottoms, nn.Linear(64, 10), labels="server", sent_inputs=("left", "right")),
            data,
            rounds=1,
            adversaries=splitfed.Adversaries(poisoning=MaliciousOptimizer(party="left")),
        )


def test_only_the_party_that_holds_what_tells_reads_labels() -> None:
    """A hundred victims of three classes: a standard deviation of .047."""
    (left,), (right,) = (three_classes().attack(FAST, adversary=party) for party in ("left0", "right0"))
    assert left.scores["attack"]["accuracy"].low > 0.9
    assert abs(right.scores["attack"]["accuracy"].mean - 1 / 3) < 0.17
