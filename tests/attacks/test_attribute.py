"""Attribute inference: what a release tells of a row beside its label.

Real digits; the task is whether a digit is five or more, the private attribute whether it is odd, of which the task
says next to nothing (half of either kind is odd, up to one digit).
"""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import splitfed
from splitfed.attacks.properties.attribute import Attribute
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import classification, regression
from splitfed.data.dataset import Dataset
from splitfed.defenses import Noise
from splitfed.models.mlp import mlp
from splitfed.topologies import vanilla
from splitfed.training.run import AttackResult, Run
from tests.attacks.examples import odd_digits as federation, odd_run as trained
from tests.examples import toy_data

ODD = Attribute(attribute="odd", queries=2)


@cache
def result(*defenses: Defense) -> AttackResult:
    (found,) = trained(*defenses).attack(ODD)
    return found


def accuracy(found: AttackResult, who: str = "attack") -> float:
    return found.scores[who]["accuracy"].mean


def test_reads_the_attribute_of_unseen_rows() -> None:
    """The most frequent answer is right for about half of the victims; the scores rank nearly all of them right."""
    assert accuracy(result(), "majority") < 0.6
    assert result().scores["attack"]["auc"].mean > 0.9


@pytest.mark.exhaustive
def test_noise_lowers_what_is_read() -> None:
    assert accuracy(result(Noise(scale=4.0, relative=True))) < accuracy(result()) - 0.1


def test_the_truth_is_the_attribute_and_not_the_label() -> None:
    victims = federation().victims
    assert torch.equal(result().truth, victims.label("odd"))
    assert not torch.equal(result().truth, victims.y)
    assert result().prediction.shape == (100, 2)
    assert result().seconds > 0


def test_the_guess_knows_no_truth() -> None:
    """The victims' attributes turned around: the prediction stays, the score turns around."""
    victims = federation().victims
    plain = Dataset("digits", victims.x, victims.y, victims.task, victims.value_range)
    turned = plain.with_target("odd", 1 - victims.label("odd"), classification(2))
    (found,) = trained().attack(ODD, victims=turned)
    assert torch.equal(found.prediction, result().prediction)
    assert accuracy(found) == pytest.approx(1 - accuracy(result()))


def test_same_seed_same_guess() -> None:
    quick = Attribute(attribute="odd", epochs=1, queries=1)
    one, two, other = (trained().attack(quick, seed=s)[0].prediction for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def toy_run(data: Dataset, auxiliary: int = 10) -> Run:
    split = data.clients(1, auxiliary=auxiliary, victims=10)
    return splitfed.train(vanilla(mlp((1, 8, 8), 10, (8,)), "relu1"), split, rounds=1)


def test_an_attribute_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=re.escape("unknown attribute of the data 'ood'; did you mean 'odd'?")):
        trained().attack(Attribute(attribute="ood"))


def test_data_without_attributes() -> None:
    with pytest.raises(
        InvalidInput, match="Attribute needs private attributes of the auxiliary data; this run does not"
    ):
        toy_run(toy_data(60)).attack(ODD)


def test_without_auxiliary_rows() -> None:
    data = toy_data(60).with_target("odd", toy_data(60).y % 2, classification(2))
    with pytest.raises(InvalidInput, match="Attribute needs auxiliary data; this run does not grant that"):
        toy_run(data, auxiliary=0).attack(ODD)


def test_a_number_is_no_class() -> None:
    data = toy_data(60).with_target("age", toy_data(60).y.float(), regression())
    with pytest.raises(InvalidInput, match="attribute 'age' has no classes; expected a label set with classes"):
        toy_run(data).attack(Attribute(attribute="age"))


def test_an_attribute_of_three_classes_is_guessed_too() -> None:
    data = toy_data(60).with_target("third", toy_data(60).y % 3, classification(3))
    (found,) = toy_run(data, auxiliary=20).attack(Attribute(attribute="third", epochs=1))
    assert found.prediction.shape == (10, 3)
