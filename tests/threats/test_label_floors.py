"""The floor of predicted labels is what the adversary's own data say, and what leaks is what an attack finds beyond."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.base import Knowledge, Progress
from splitfed.attacks.labels.co_training import CoTraining
from splitfed.attacks.labels.gaussian_mixture import GaussianMixture
from splitfed.attacks.labels.model_completion import ModelCompletion
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.labels.own_features import OwnFeatures
from splitfed.attacks.labels.similar import Similar
from splitfed.attacks.labels.strongest_labels import StrongestLabels
from splitfed.attacks.scoring.label_metrics import EXCESS, auc_difference, score_labels
from splitfed.core.defense import Defense
from splitfed.core.messages import View
from splitfed.core.random import generator, stream
from splitfed.core.tasks import binary
from splitfed.data.dataset import Dataset
from splitfed.study.report.text import baseline, beats_baseline, beside_baseline
from splitfed.study.run.terminal_table import BASELINES
from splitfed.threats.floors import LABELS, predict_own_labels
from splitfed.topologies import vertical
from splitfed.training.run import AttackResult, Run
from tests.attacks.examples import drowned, u_digits
from tests.attacks.label_examples import sums
from tests.examples import asked
from tests.object_graph import reachable
from tests.thinning import thin

VICTIMS, HINTS = 200, 6


@cache
def world(*defenses: Defense, telling: float = 0.0) -> Run:
    """Two classes; the left party's four columns say nothing of them, or with `telling` a part; the right one's do."""
    drawn = generator(11, "floors")
    x = torch.randn(600, 8, generator=drawn)
    raw = x[:, 4:] @ torch.tensor([2.0, -2.0, 1.0, 1.0]) + telling * x[:, 0]
    data = Dataset("told", x, (raw > 0).long(), binary()).vertical({"left": range(4), "right": range(4, 8)})
    with stream(0):
        bottoms = {role: nn.Sequential(nn.Linear(4, 8), nn.ReLU()) for role in ("left", "right")}
        top = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    clients = data.clients(1, auxiliary=60, victims=VICTIMS)
    return sf.train(vertical(bottoms, top, labels="server"), clients, rounds=4, defenses=defenses)


def telling(*defenses: Defense) -> Run:
    """The world in which the adversary's own columns say much."""
    return world(*defenses, telling=6.0)


ATTACKS = (
    Similar(hints=HINTS), GaussianMixture(hints=HINTS), CoTraining(hints=HINTS),
    StrongestLabels(iterations=10, doublings=1, hints=HINTS),
)  # fmt: skip


def attacked(run: Run, attack: Any) -> AttackResult:
    (result,) = run.attack(attack, adversary="left0")
    return result


@pytest.mark.parametrize("attack", thin(ATTACKS, 3), ids=lambda one: type(one).__name__)
def test_what_gradients_alone_tell_is_beyond_the_floor(attack: Any) -> None:
    scores = attacked(world(), attack).scores
    # With twelve known labels, or seventy with those of auxiliary rows, columns that say nothing may say a little.
    assert scores[LABELS]["auc"].mean < 0.65
    for metric in ("auc", "accuracy"):
        excess = scores[EXCESS][metric]
        assert excess.mean == pytest.approx(scores["attack"][metric].mean - scores[LABELS][metric].mean)
        assert 0.03 < excess.low <= excess.mean <= excess.high


@pytest.mark.parametrize("attack", thin(ATTACKS, 2), ids=lambda one: type(one).__name__)
def test_where_gradients_tell_nothing_nothing_is_beyond_the_floor(attack: Any) -> None:
    """The attack may be right as often as its own columns are: that is no leak."""
    scores = attacked(drowned(telling), attack).scores
    assert scores[LABELS]["auc"].mean > 0.75
    assert scores[EXCESS]["auc"].low <= 0
    if isinstance(attack, CoTraining | StrongestLabels):
        assert scores["attack"]["auc"].mean > 0.75
        assert scores[EXCESS]["auc"].high > -0.05


def by_newton(rows: Tensor, labels: Tensor) -> Tensor:
    """Weights and the intercept, last, of a logistic regression with half the squared weights as its penalty."""
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
    penalty = torch.eye(rows.shape[1], dtype=rows.dtype)
    penalty[-1, -1] = 0
    found = torch.zeros(rows.shape[1], dtype=rows.dtype)
    for _ in range(50):
        p = (rows @ found).sigmoid()
        slope = rows.T @ (p - labels) + penalty @ found
        found = found - torch.linalg.solve(rows.T @ ((p * (1 - p))[:, None] * rows) + penalty, slope)
    return found


def test_the_floor_is_a_logistic_regression_on_own_columns_and_own_releases() -> None:
    """By another algorithm, from the run's own tensors."""
    run, attack = telling(), Similar(hints=HINTS)
    case = run.evaluator.case(asked(run.evaluator, attack, "left0", "similar"))
    columns = run.data.victims.x[:, :4].double()
    (segment,) = run.engine.parties["left0"].state.modules.values()
    with torch.no_grad():
        released = segment.eval()(columns.float()).double()
    rows = torch.cat([columns, released], 1)
    rows = rows[:, rows.std(0) > 0]
    rows = (rows - rows.mean(0)) / rows.std(0, correction=0)
    known = torch.cat([case.hints[0], case.hints[1]])
    labels = torch.tensor([0.0] * HINTS + [1.0] * HINTS, dtype=torch.float64)
    weights = by_newton(rows[known], labels)
    expected = rows @ weights[:-1] + weights[-1]
    floor = predict_own_labels(attack, case.view, case.knowledge)[LABELS]
    assert torch.allclose(floor[:, 1] - floor[:, 0], expected, atol=1e-5)
    scored = attacked(run, attack).scores[LABELS]["accuracy"]
    left = torch.ones(VICTIMS, dtype=torch.bool)
    left[known] = False
    assert scored.mean == float(((expected > 0).long() == run.data.victims.y)[left].double().mean())


@dataclass(frozen=True)
class Watched(OwnFeatures):
    """Keeps what it is given."""

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        GIVEN.extend((view, knowledge))
        return super().run(view, knowledge, generator, progress)


GIVEN: list[Any] = []


@pytest.mark.parametrize("attack", [Similar(hints=HINTS), CoTraining(hints=HINTS)], ids=["similar", "co_training"])
def test_the_floor_is_shown_no_message(attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a gradient nor anything else that arrived, whatever the attack beside it reads."""
    monkeypatch.setattr("splitfed.threats.floors.load", lambda kind, name: Watched)
    GIVEN.clear()
    run = world()
    case = run.evaluator.case(asked(run.evaluator, attack, "left0"))
    predict_own_labels(attack, case.view, case.knowledge)
    view, knowledge = GIVEN
    assert view.messages == ()
    assert case.view.messages
    received = [z for message in case.view.messages for z in message.tensors.values()]
    held = [t for t in reachable(GIVEN) if isinstance(t, Tensor)]
    assert not [z for z in received for t in held if t.shape == z.shape and torch.equal(t, z)]
    assert (knowledge.auxiliary_labels is None) == isinstance(attack, Similar)


def test_the_floor_knows_the_labels_that_the_attack_knows() -> None:
    """Of auxiliary rows as many as it, and none where it has none."""
    run = telling()

    def known(attack: Any) -> int:
        case = run.evaluator.case(asked(run.evaluator, attack, "left0"))
        GIVEN.clear()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("splitfed.threats.floors.load", lambda kind, name: Watched)
            predict_own_labels(attack, case.view, case.knowledge)
        labels = GIVEN[1].auxiliary_labels
        return sum(len(rows) for rows in GIVEN[1].hints.values()) + (0 if labels is None else len(labels))

    assert known(Similar(hints=3)) == 6
    assert known(ModelCompletion(labelled=4)) == 8
    assert known(StrongestLabels(hints=3)) == 6 + 60


def test_who_knows_no_label_or_holds_no_column_has_no_floor() -> None:
    assert not {LABELS, EXCESS} & set(attacked(world(), Norm()).scores)
    (result,) = u_digits().attack(Similar(), adversary="server")
    assert not {LABELS, EXCESS} & set(result.scores)
    (result,) = world().attack(Similar(), adversary="left0", floors=False)
    assert not {LABELS, EXCESS} & set(result.scores)


def test_ten_classes_have_a_floor_and_an_excess() -> None:
    for attack in (Similar(hints=2), CoTraining(hints=2)):
        scores = attacked(sums(), attack).scores
        assert scores[LABELS]["accuracy"].mean > 0.3
        assert scores[EXCESS]["accuracy"].low > 0


def test_results_tell_the_floor_and_the_excess() -> None:
    result = attacked(world(), Similar(hints=HINTS))
    told = {(row["metric"], row["of"]): row for row in result.rows()}
    assert told["auc", EXCESS]["low"] > 0
    assert told["auc", LABELS]["mean"] == result.scores[LABELS]["auc"].mean
    assert f"own_features {result.scores[LABELS]['auc'].mean:.4g}" in repr(result)
    assert f"excess {result.scores[EXCESS]['auc'].mean:.4g}" in repr(result)
    assert {LABELS, EXCESS} < set(BASELINES)


@pytest.mark.parametrize(("low", "leaks"), [(0.01, True), (-0.01, False)])
def test_the_report_counts_what_is_beyond_the_floor(low: float, leaks: bool) -> None:
    """An AUC far above chance is no finding where own data reach as much."""

    def score(mean: float, low: float | None = None) -> dict[str, Any]:
        return {"mean": mean, "low": mean - 0.01 if low is None else low, "high": mean + 0.01}

    found = {"attack": score(0.98), "majority": score(0.5), LABELS: score(0.95), EXCESS: score(0.03, low)}
    attack = {"target": "labels", "scores": {"auc": found}}
    summary: dict[str, Any] = {"metrics": ["auc"]}
    assert baseline(attack, "auc") == found[LABELS]
    assert beats_baseline(attack, "auc") is leaks
    assert beside_baseline(summary, attack, "auc") == " (own data alone 0.950, beyond it 0.030)"
    bare = {"target": "labels", "scores": {"auc": {who: found[who] for who in ("attack", "majority")}}}
    assert beats_baseline(bare, "auc")
    assert beside_baseline(summary, bare, "auc") == " (chance 0.500)"


def test_the_excess_by_hand() -> None:
    truth = torch.tensor([0, 0, 0, 1, 1, 1] * 10)
    right, wrong = torch.eye(2)[truth], torch.eye(2)[1 - truth]
    half = torch.where((torch.arange(60) % 2 == 0)[:, None], right, wrong)

    def scored(prediction: Tensor, floor: Tensor) -> Any:
        return score_labels(truth, prediction, truth, generator(0), floors={LABELS: floor})

    found = scored(right, half)
    assert found[EXCESS]["accuracy"].mean == 0.5
    assert found[EXCESS]["auc"].mean == 1 - found[LABELS]["auc"].mean
    assert scored(half, half)[EXCESS]["auc"].mean == 0
    assert (scored(half, half)[EXCESS]["auc"].low, scored(half, half)[EXCESS]["auc"].high) == (0, 0)
    # Whoever is measurably the wrong way round leaks as much as who is right.
    assert scored(wrong, half)[EXCESS]["auc"].mean == pytest.approx(1 - found[LABELS]["auc"].mean)
    assert scored(wrong, half)[EXCESS]["accuracy"].mean == -0.5
    assert auc_difference(right[:, 1], half[:, 1], truth == 1, generator(1)).low > 0
    # Of several floors the best one counts.
    for floors in ({"one": half, "other": wrong}, {"one": wrong, "other": half}):
        assert score_labels(truth, right, truth, generator(0), floors=floors)[EXCESS]["accuracy"].mean == 0.5
