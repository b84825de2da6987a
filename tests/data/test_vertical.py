"""Vertical partitions by hand: columns and strips, further targets, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from splitfed.core.tasks import classification, regression
from splitfed.data import Dataset, LabelSet, breast_cancer, mnist5k
from tests.examples import refusal


def table(width: int = 5) -> Dataset:
    return Dataset("toy", torch.arange(2.0 * width).reshape(2, width), torch.tensor([0, 1]), classification(2))


def image(width: int = 5) -> Dataset:
    x = torch.arange(2.0 * width).reshape(1, 1, 2, width)
    return Dataset("pictures", x, torch.tensor([0]), classification(2))


def held(data: Dataset) -> dict[str, list[int]]:
    return {name: feature.positions.tolist() for name, feature in data.features.items()}


def test_columns_in_order() -> None:
    assert held(table().vertical(2)) == {"party0": [0, 1, 2], "party1": [3, 4]}
    assert held(table().vertical(5)) == {f"party{i}": [i] for i in range(5)}
    assert [f.shape for f in breast_cancer().vertical(4).features.values()] == [(8,), (8,), (7,), (7,)]


def test_columns_by_name() -> None:
    data = table().vertical({"bank": [4, 0], "shop": range(1, 4)})
    assert held(data) == {"bank": [4, 0], "shop": [1, 2, 3]}
    assert data.features["bank"].select(data.x).tolist() == [[4, 0], [9, 5]]
    assert held(table(2).vertical({"a": [0, 1], "b": [1]}, overlap=True)) == {"a": [0, 1], "b": [1]}


def test_halves_and_strips() -> None:
    # 0 1 2 | 3 4
    # 5 6 7 | 8 9
    data = image().halves()
    assert held(data) == {"left": [0, 1, 2, 5, 6, 7], "right": [3, 4, 8, 9]}
    assert data.features["right"].select(data.x).tolist() == [[[[3, 4], [8, 9]]]]
    assert held(image().strips(3)) == {"party0": [0, 1, 5, 6], "party1": [2, 3, 7, 8], "party2": [4, 9]}
    assert list(image().halves(("a", "b")).features) == ["a", "b"]
    assert [f.shape for f in mnist5k().rows([0]).strips(4).features.values()] == [(1, 28, 7)] * 4


COLUMNS: list[tuple[Any, str]] = [
    (0, "parties=0 is not allowed; expected a whole number of at least 1"),
    ("two", "parties='two' is not allowed; expected a whole number of at least 1"),
    (6, "parties=6 is not allowed: toy has 5 columns; expected 1 to 5"),
    ({}, "toy: no party is given; expected at least one with its columns"),
    ({"a": range(5), "b": []}, "toy: party 'b' has no columns; expected at least one"),
    ({"a": [0, 5]}, "toy: party 'a' has no column 5 to hold; expected 0 to 4"),
    ({"a": [-1]}, "toy: party 'a' has no column -1 to hold; expected 0 to 4"),
    ({"a": [0.0]}, "toy: party 'a' has no column 0.0 to hold; expected 0 to 4"),
    ({"a": [0, 1, 0, 2, 3, 4]}, "toy: party 'a' is given column 0 twice; expected once"),
    (
        {"a": [0, 1, 2], "b": [2, 3, 4]},
        "toy: column 2 is given to 'a' and to 'b'; expected one, or overlap=True",
    ),
    ({"a": [0, 4]}, "toy: column 1 is given to no party (3 in all); with_features leaves columns out"),
]


@pytest.mark.parametrize(("parties", "text"), COLUMNS)
def test_columns_refused(parties: Any, text: str) -> None:
    assert refusal(table().vertical, parties) == text


def test_shapes_and_strips_refused() -> None:
    assert refusal(image().vertical, 2) == (
        "pictures has rows of shape (1, 2, 5), which are no columns; take halves or strips of an image"
    )
    assert refusal(table().halves) == "toy has rows of shape (5,), which are no images; take vertical for columns"
    assert refusal(image().strips, 6) == "strips=6 is not allowed: pictures is 5 pixels wide; expected 1 to 5"
    assert refusal(image().strips, 2, ["a", "a"]) == (
        "names=['a', 'a'] of strips are not allowed; expected 2, each once"
    )
    assert refusal(image().halves, "ab") == "names='ab' is not allowed; expected a list of text"
    assert refusal(image().halves, ["a"]) == "names=['a'] of strips are not allowed; expected 2, each once"


def test_targets_follow_their_rows() -> None:
    data = table().with_target("size", torch.tensor([2.5, 3.5]), regression())
    data = data.with_target("odd", torch.tensor([1, 0]), classification(2))
    assert {name: task.name for name, task in data.tasks.items()} == {
        None: "classification",
        "size": "regression",
        "odd": "classification",
    }
    assert data.rows([1, 0, 1]).label("size").tolist() == [3.5, 2.5, 3.5]
    assert data.rows([1]).join([data.rows([0])]).label("odd").tolist() == [0, 1]
    assert data.label().tolist() == [0, 1]
    assert table().targets == {}


def test_targets_refused() -> None:
    odd = torch.tensor([1, 0])
    data = table().with_target("odd", odd, classification(2))
    assert refusal(data.label, "od") == "unknown target of toy: 'od'; did you mean 'odd'? (allowed: odd)"
    assert refusal(data.with_target, "odd", odd, classification(2)) == (
        "target name 'odd' of toy is not allowed; expected a new one, not empty"
    )
    assert refusal(table().with_target, "odd", odd[:1], classification(2)) == (
        "toy: target 'odd': x has 2 rows and y has shape (1,); expected a label a row"
    )
    assert refusal(table().with_target, "odd", odd + 1, classification(2)) == (
        "toy: target 'odd': label 2 is outside [0, 1]"
    )
    targets = {"size": LabelSet(odd.double(), regression())}
    assert refusal(Dataset, "toy", table().x, odd, classification(2), targets=targets) == (
        "toy: target 'size': y has type float64; expected int64 or float32 for regression"
    )
    assert refusal(table().join, [data]) == "toy has targets [] and toy ['odd']; expected parts of the same source"


def named() -> Dataset:
    x = torch.arange(8.0).reshape(2, 4)
    return Dataset("people", x, torch.tensor([0, 1]), classification(2), columns=("age", "sex", "sex", "income"))


def test_columns_by_their_own_names() -> None:
    data = named().vertical({"bank": ["income", 0], "clinic": ["sex"]})
    assert held(data) == {"bank": [3, 0], "clinic": [1, 2]}
    parts = data.rows([1, 0]), data.join([data]), replace(data, name="others")
    assert [part.columns for part in parts] == [named().columns] * 3


NAMED: list[tuple[Any, str]] = [
    ({"a": ["agee"]}, "unknown column of people: 'agee'; did you mean 'age'? (allowed: age, income, sex)"),
    ({"a": "age"}, "people: party 'a' is given 'age'; expected a list of columns"),
    ({"a": ["sex", 1]}, "people: party 'a' is given column 1 ('sex') twice; expected once"),
    (
        {"a": ["age", "sex"], "b": [2, 3]},
        "people: column 2 ('sex') is given to 'a' and to 'b'; expected one, or overlap=True",
    ),
    ({"a": ["sex"]}, "people: column 0 ('age') is given to no party (2 in all); with_features leaves columns out"),
]


@pytest.mark.parametrize(("parties", "text"), NAMED)
def test_named_columns_refused(parties: Any, text: str) -> None:
    assert refusal(named().vertical, parties) == text


def test_names_of_columns_refused() -> None:
    assert refusal(table().vertical, {"a": ["age"]}) == (
        "toy: party 'a' is given column 'age', and columns have no names here"
    )
    assert refusal(replace, table(), columns=("a", "b")) == "toy: 2 columns are named, and rows have shape (5,)"


def test_breast_cancer_names_its_columns() -> None:
    data = breast_cancer().vertical({"a": ["mean radius", "worst area"], "b": list(range(30))}, overlap=True)
    assert held(data)["a"] == [0, 23]
