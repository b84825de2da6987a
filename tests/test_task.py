"""The built-in tasks: losses and metrics worked out by hand, and labels refused in one line."""

from __future__ import annotations

import math

import pytest
import torch

from splitfed.errors import InvalidInput
from splitfed.task import Task, binary, classification, regression
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
