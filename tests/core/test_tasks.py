"""The built-in tasks: losses and metrics worked out by hand, and labels refused in one line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.core.tasks import Task, binary, classification, regression
from splitfed.stats.utility import ConstantAnswer, below_constant, constant_of, over_rows
from tests.rounding import single


def test_classification() -> None:
    task = classification(3)
    assert (task.name, task.outputs, task.metric_name, task.higher_is_better) == (
        "classification",
        3,
        "accuracy",
        True,
    )
    y = torch.tensor([0, 2])
    # Equal logits: each class has probability 1/3.
    assert float(task.loss(torch.zeros(2, 3), y)) == single(math.log(3))
    outputs = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    assert task.metric(outputs, y) == 0.5


def test_binary() -> None:
    task = binary()
    y = torch.tensor([1, 0, 1, 1])
    assert task.outputs == 1
    assert float(task.loss(torch.zeros(4, 1), y)) == single(math.log(2))
    # Logits above 0 mean class 1, so the last of the four is wrong.
    assert task.metric(torch.tensor([[1.0], [-1.0], [3.0], [-2.0]]), y) == 0.75
    # A logit of log 3 gives class 1 three quarters: losses -log(3/4) and -log(1/4).
    two = torch.tensor([[math.log(3)], [math.log(3)]])
    assert float(task.loss(two, torch.tensor([1, 0]))) == single((-math.log(0.75) - math.log(0.25)) / 2)


def test_regression() -> None:
    task = regression()
    y = torch.tensor([1.0, 2.0, 3.0])
    # Squared errors 0, 0, 9; around the mean 2 the squares sum to 2.
    outputs = torch.tensor([[1.0], [2.0], [6.0]])
    assert float(task.loss(outputs, y)) == single(3.0)
    assert task.metric(outputs, y) == single(1 - 9 / 2)
    assert task.metric(y[:, None], y) == 1.0
    assert task.metric(torch.full((3, 1), 2.0), y) == 0.0


def test_regression_averages_its_targets() -> None:
    y = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    # First target exact (1), second at its mean (0).
    assert regression(2).metric(torch.tensor([[0.0, 2.0], [2.0, 2.0]]), y) == single(0.5)


@pytest.mark.parametrize(
    ("task", "y", "text"),
    [
        (classification(3), torch.tensor([0, 3, 5]), "label 3 is outside [0, 2]"),
        (classification(3), torch.tensor([-1]), "label -1 is outside [0, 2]"),
        (classification(3), torch.tensor([[0]]), "labels have shape (1, 1); expected one label a row"),
        (classification(3), torch.tensor([0.5]), "labels must be whole numbers in [0, 2]; found 0.5"),
        (binary(), torch.tensor([0, 1, 2]), "label 2 is outside [0, 1]"),
        (regression(), torch.tensor([1.0, float("nan")]), "targets hold a value that is not finite"),
    ],
)
def test_bad_labels(task: Task, y: torch.Tensor, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        task.check(y)
    assert str(caught.value) == text


def test_good_labels_pass() -> None:
    classification(3).check(torch.tensor([0, 1, 2]))
    binary().check(torch.tensor([0.0, 1.0]))
    regression(2).check(torch.zeros(4, 2))


@pytest.mark.parametrize(("make", "name", "low"), [(classification, "classes", 2), (regression, "outputs", 1)])
def test_too_few(make: object, name: str, low: int) -> None:
    with pytest.raises(InvalidInput, match=rf"^{name}=0 is not allowed; expected a whole number of at least {low}$"):
        make(0)  # type: ignore[operator]


def test_the_constant_answer_by_hand() -> None:
    # Class 2 is most frequent in training, and 1 of 4 rows there; always saying 1 would have been right in 2.
    seen, asked = torch.tensor([2, 2, 0, 1]), torch.tensor([1, 1, 2, 0])
    task = classification(3)
    assert task.constant is not None
    assert task.metric(task.constant(seen, 4), asked) == 0.25
    yes_or_no = binary()
    assert yes_or_no.constant is not None
    assert yes_or_no.metric(yes_or_no.constant(torch.tensor([1.0, 1.0, 0.0]), 4), torch.tensor([1, 0, 0, 0])) == 0.25
    # The mean of training is 2: squares 1, 1, 1 and 9 in these rows, where their own mean of 1 has 4, 0, 0 and 4.
    numbers = regression()
    assert numbers.constant is not None
    rows = torch.tensor([3.0, 1.0, 1.0, -1.0])
    assert numbers.metric(numbers.constant(torch.tensor([1.0, 3.0]), 4), rows) == pytest.approx(1 - 12 / 8)
    assert regression(2).constant(torch.zeros(5, 2), 4).shape == (4, 2)  # type: ignore[misc]


def test_what_is_no_better_than_the_constant_answer_is_said() -> None:
    blind = ConstantAnswer(0.23, "always answering the most frequent class")
    told = "accuracy 0.12 is below 0.23 of always answering the most frequent class"
    assert below_constant("accuracy", 0.12, blind) == told
    assert below_constant("accuracy", 0.23, blind) == told.replace("0.12 is below", "0.23 is no more than")
    assert below_constant("accuracy", 0.24, blind) is None
    assert below_constant("error", 0.24, blind, higher_is_better=False) == (
        "error 0.24 is above 0.23 of always answering the most frequent class"
    )
    assert below_constant("error", 0.12, blind, higher_is_better=False) is None
    assert constant_of(classification(2), [torch.zeros(0)], [torch.tensor([1])]) is None
    assert constant_of(classification(2), [], []) is None


def test_only_a_share_of_rows_has_wilsons_interval() -> None:
    output, y = torch.eye(3)[torch.tensor([0, 1, 2, 0] * 5)], torch.tensor([0, 1, 2, 1] * 5)
    assert over_rows(classification(3), output, y, generator(0))["kind"] == "Wilson over rows"
    balanced = replace(classification(3), metric=lambda o, t: 5 / 6 if len(t) == 20 else 0.0)
    assert over_rows(balanced, output, y, generator(0))["kind"] == "bootstrap over rows"
