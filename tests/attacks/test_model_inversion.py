"""Model inversion, and the classifier of clean rows that grades what it and the reconstructions return."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Knowledge
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.inversion import roughness
from splitfed.attacks.reconstruction.model_inversion import ModelInversion
from splitfed.attacks.scoring.class_metrics import score_representatives
from splitfed.attacks.scoring.classifier import clean_classifier
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.core.random import generator
from splitfed.core.tasks import classification, regression
from splitfed.data.candidates import trained_rows
from splitfed.data.dataset import Dataset
from splitfed.defenses import Noise
from splitfed.models.mlp import mlp
from splitfed.topologies import vanilla
from splitfed.training.run import AttackResult, Run
from tests.attacks.examples import classes_run as trained, more_digits as federation
from tests.examples import toy_data
from tests.rounding import single


@cache
def result(*defenses: Defense, decay: float = 0.0) -> AttackResult:
    (found,) = trained(*defenses, decay=decay).attack(ModelInversion(iterations=200))
    return found


def accuracy(found: AttackResult, who: str = "attack") -> float:
    return found.scores[who]["accuracy"].mean


def test_another_model_recognises_the_representatives() -> None:
    """The mean image is of one class at most: right for one class in ten."""
    assert accuracy(result(), "mean_image") <= 0.1
    assert accuracy(result()) >= 0.6
    assert accuracy(result(), "truth") == 1.0


def test_the_truth_is_the_mean_of_each_class_that_was_trained_on() -> None:
    rows = trained_rows(federation())
    assert torch.allclose(result().truth[3], rows.x[rows.y == 3].mean(0))
    assert result().prediction.shape == result().truth.shape == (10, 1, 8, 8)
    assert 0.0 <= float(result().prediction.min()) <= float(result().prediction.max()) <= 1.0
    assert set(result().scores["attack"]) == {"psnr", "ssim", "mse", "accuracy"}
    assert set(result().scores) == {"attack", "mean_image", "random_pairing", "truth"}
    assert result().seconds > 0


def test_defenses_are_at_their_mean() -> None:
    run = trained(Noise(scale=0.5))
    known = run.evaluator.grants.knowledge("server", 0, 0)
    x = federation().auxiliary.x[:8]
    assert known.model is not None
    modules = run.engine.modules(0)
    wanted = modules["top"].eval()(modules["bottom"].eval()(x))
    assert torch.allclose(known.model(x), wanted, atol=1e-6)


def test_known_weights_give_what_the_parties_compute() -> None:
    known = trained().evaluator.grants.knowledge("server", 0, 0)
    x = federation().auxiliary.x[:8]
    assert known.model is not None
    assert known.predict is not None
    assert torch.allclose(known.model(x), trained().predict(x), atol=1e-6)
    assert torch.equal(known.predict(x), trained().predict(x))


def toy(attack: ModelInversion, model: Callable[[Tensor], Tensor], **changes: Any) -> Tensor:
    known = Knowledge(**{"shape": (2,), "value_range": (0.0, 1.0), "classes": 2, "model": model, **changes})
    return attack(View("server", ()), known, generator(0)).prediction


def test_the_most_confident_row_by_hand() -> None:
    """Class 0 is the more likely the greater x0 and the smaller x1: corners of the square."""
    found = toy(ModelInversion(tv=0.0), lambda x: torch.stack([x[:, 0], x[:, 1]], 1))
    assert found.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_one_step_by_hand(optimizer: str) -> None:
    """At the middle p = 1/2 and the cost falls by 1/4 per unit of its own logit: descent moves rate / 4, Adam rate.

    The best row among two visits is the second, as the first has the greater cost.
    """
    step = 0.1 if optimizer == "adam" else 0.1 / 4
    found = toy(ModelInversion(iterations=2, tv=0.0, lr=0.1, optimizer=optimizer), lambda x: x)
    assert found.flatten().tolist() == single([0.5 + step, 0.5 - step, 0.5 - step, 0.5 + step])


def test_enough_confidence_stops_a_class() -> None:
    """Each stops at the first row of at least 60 %; without a limit it goes on to the corner, 73 %."""

    def sure(x: Tensor) -> float:
        return float(x.softmax(1).diagonal().max())

    limited = toy(ModelInversion(tv=0.0, enough=0.6, lr=0.01), lambda x: x)
    assert 0.6 <= sure(limited) < 0.61
    assert sure(toy(ModelInversion(tv=0.0, lr=0.01), lambda x: x)) == pytest.approx(0.731, abs=1e-3)


def test_patience_stops_a_class_without_progress() -> None:
    calls: list[int] = []

    def flat(x: Tensor) -> Tensor:
        calls.append(len(x))
        return 0.0 * x

    toy(ModelInversion(tv=0.0, patience=7, iterations=100), flat)
    assert len(calls) == 8, "one that is the best so far, and seven that are no better"


def test_a_single_logit_has_two_classes() -> None:
    found = toy(ModelInversion(tv=0.0), lambda x: x[:, :1] - x[:, 1:])
    assert found.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_roughness_by_hand() -> None:
    """Rows 0 1 / 0 3: down (0, 2) gives a mean of 2, across (1, 3) one of 5."""
    x = torch.stack([torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.ones(2, 2)])[:, None]
    assert roughness(x).tolist() == [7.0, 0.0]
    assert roughness(torch.rand(3, 5)).tolist() == [0.0, 0.0, 0.0]


def test_representatives_are_graded_by_the_classes_there_are() -> None:
    """Class 1 was never trained on: its row is not scored."""
    x = torch.rand(40, 1, 8, 8, generator=generator(0))
    y = torch.arange(40) % 2 * 2
    auxiliary = Dataset("toy", x, y, classification(3), (0.0, 1.0))
    truth, scores = score_representatives(torch.zeros(3, 1, 8, 8), auxiliary, auxiliary, generator(0))
    assert torch.allclose(truth, torch.stack([x[::2].mean(0), x[1::2].mean(0)]))
    assert scores["attack"]["mse"].mean == single(float(truth.square().mean()))
    assert scores["attack"]["mse"].n == 2


@cache
def inverted(classifier: bool) -> AttackResult:
    (found,) = trained().attack(InverseNetwork(epochs=15, batch_size=16, width=16), classifier=classifier)
    return found


@pytest.mark.exhaustive
def test_a_classifier_recognises_reconstructions() -> None:
    assert accuracy(inverted(True), "truth") > 0.85
    assert accuracy(inverted(True), "mean_image") < 0.3
    assert accuracy(inverted(True), "random_pairing") < 0.4
    assert accuracy(inverted(True)) > 0.6


@pytest.mark.exhaustive
def test_scoring_by_a_classifier_changes_no_other_figure() -> None:
    plain, with_it = inverted(False), inverted(True)
    assert torch.equal(plain.prediction, with_it.prediction)
    assert set(with_it.scores) - set(plain.scores) == {"truth"}
    for who, metrics in plain.scores.items():
        assert {m: i for m, i in with_it.scores[who].items() if m != "accuracy"} == metrics


def test_the_classifier_is_kept_with_its_rows_and_always_the_same() -> None:
    one = toy_data(80)
    x, y = one.x[:20], one.y[:20]
    before = torch.get_rng_state()
    first = clean_classifier(one, x, y, 10)
    assert clean_classifier(one, x, y, 10) is first
    again = clean_classifier(toy_data(80), x, y, 10)
    assert again is not first
    assert torch.equal(again(one.x), first(one.x))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_paper_budget_is_the_authors_settings() -> None:
    wanted = ModelInversion(iterations=5000, optimizer="sgd", lr=0.1, tv=0.0, enough=0.99, patience=100)
    assert ModelInversion.with_budget("full") == wanted


def toy_run(data: Dataset, model: nn.Module, auxiliary: int = 10) -> Run:
    return splitfed.train(vanilla(model, "relu1"), data.clients(1, auxiliary=auxiliary, victims=10), rounds=1)


def test_a_regression_has_no_classes() -> None:
    data = toy_data(60)
    numbers = Dataset("numbers", data.x, data.y.float(), regression(), data.value_range)
    run = toy_run(numbers, mlp((1, 8, 8), 1, (8,)))
    with pytest.raises(InvalidInput, match="model_inversion needs labels with classes; those of this run have none"):
        toy(ModelInversion(), lambda x: x, classes=None)
    with pytest.raises(InvalidInput, match="scoring by a classifier needs classes"):
        run.attack(InverseNetwork(epochs=1), classifier=True)


def test_without_auxiliary_rows_nobody_can_grade() -> None:
    run = toy_run(toy_data(60), mlp((1, 8, 8), 10, (8,)), auxiliary=0)
    with pytest.raises(InvalidInput, match="scoring by a classifier needs two auxiliary rows or more; found 0"):
        run.attack(ModelInversion(iterations=1))
