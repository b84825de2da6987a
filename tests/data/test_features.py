"""Features select the numbers they name, give each party memory of its own, and feed a topology's inputs."""

from __future__ import annotations

import pytest
import torch

from splitfed.core.tasks import classification
from splitfed.data import Dataset, Feature, breast_cancer, feed, mnist5k
from tests.examples import refusal

# Two rows of 2 x 3: [[0, 1, 2], [3, 4, 5]] and [[6, 7, 8], [9, 10, 11]].
X = torch.arange(12.0).reshape(2, 2, 3)


def feature(positions: list[int], *shape: int) -> Feature:
    return Feature(torch.tensor(positions), shape or (len(positions),))


def test_select_a_run() -> None:
    assert feature([1, 2, 3]).select(X).tolist() == [[1, 2, 3], [7, 8, 9]]
    assert feature([2, 3, 4, 5], 1, 2, 2).select(X).tolist() == [[[[2, 3], [4, 5]]], [[[8, 9], [10, 11]]]]


def test_select_here_and_there_in_the_order_asked() -> None:
    assert feature([5, 0]).select(X).tolist() == [[5, 0], [11, 6]]
    assert feature([3, 2, 1]).select(X).tolist() == [[3, 2, 1], [9, 8, 7]]
    # The right column of both lines.
    assert feature([2, 5], 2, 1).select(X).tolist() == [[[2], [5]], [[8], [11]]]


@pytest.mark.parametrize("positions", [[0, 1], [4, 1], list(range(6))])
def test_select_returns_memory_of_its_own(positions: list[int]) -> None:
    for x in (X, X[:1]):
        part = feature(positions).select(x)
        assert part.is_contiguous()
        assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert part.untyped_storage().nbytes() == 4 * len(x) * len(positions)


@pytest.mark.parametrize("positions", [[1, 2], [2, 1]])
def test_gradient_reaches_the_part_only(positions: list[int]) -> None:
    x = X.clone().requires_grad_()
    feature(positions).select(x).square().sum().backward()
    # The derivative of x squared is 2 x, at positions 1 and 2.
    assert x.grad is not None
    assert x.grad.flatten(1).tolist() == [[0, 2, 4, 0, 0, 0], [0, 14, 16, 0, 0, 0]]


def test_no_rows() -> None:
    assert feature([1, 2], 2, 1).select(X[:0]).shape == (0, 2, 1)
    assert feature([2, 0]).select(X[:0]).shape == (0, 2)


BAD = [
    (
        torch.zeros(2),
        (2,),
        "positions of a feature have shape (2,) and type float32 on cpu; expected (k,), at least one, int64, on cpu",
    ),
    (
        torch.zeros(1, 2, dtype=torch.int64),
        (2,),
        "positions of a feature have shape (1, 2) and type int64 on cpu; expected (k,), at least one, int64, on cpu",
    ),
    (
        torch.zeros(0, dtype=torch.int64),
        (0,),
        "positions of a feature have shape (0,) and type int64 on cpu; expected (k,), at least one, int64, on cpu",
    ),
    (torch.tensor([3, -1]), (2,), "position -1 of a feature is not allowed; expected 0 or more"),
    (torch.tensor([3, 1, 3]), (3,), "position 3 occurs twice in a feature; expected once"),
    (torch.tensor([3, 1]), (3,), "a feature of 2 positions cannot have shape (3,)"),
    (torch.tensor([3, 1]), (-1, -2), "a feature of 2 positions cannot have shape (-1, -2)"),
    (torch.tensor([3]), (), "a feature of 1 positions cannot have shape ()"),
]


@pytest.mark.parametrize(("positions", "shape", "text"), BAD)
def test_feature_refused(positions: torch.Tensor, shape: tuple[int, ...], text: str) -> None:
    assert refusal(Feature, positions, shape) == text


def test_select_refused() -> None:
    expected = "x has shape (2, 2, 3); a feature needs at least 7 numbers in every row of (n, ...)"
    assert refusal(feature([6]).select, X) == expected
    assert refusal(feature([0]).select, torch.zeros(3)).startswith("x has shape (3,);")


PARTS = {"left": feature([0, 3], 2, 1), "right": feature([1, 2, 4, 5], 2, 2)}


def test_feed_by_name() -> None:
    fed = feed(X, {"right": "bob", "left": "alice"}, PARTS)
    assert list(fed) == ["right", "left"]
    assert fed["left"][0].tolist() == [[0], [3]]
    assert fed["right"][1].tolist() == [[7, 8], [10, 11]]
    assert list(feed(X, {"left": "alice"}, PARTS)) == ["left"]


def test_feed_the_whole_to_one_input() -> None:
    for parts in ({}, PARTS):
        assert feed(X, {"x": "client"}, parts)["x"] is X


def test_feed_refused() -> None:
    # Else a model of two arguments would get one tensor as both.
    assert refusal(feed, X, {"input_ids": "client", "attention_mask": "client"}, PARTS) == (
        "inputs 'input_ids', 'attention_mask' of client: the data has no features of these names, so each would get "
        "each whole row; give the parts by name, from_arrays({name: array, ...}, y), or with_features"
    )
    assert refusal(feed, X, {"a": "alice", "b": "bob"}, {}) == (
        "inputs 'a' of alice, 'b' of bob: the data has no features, so every role would get each whole row; "
        "define the part of each with Dataset.vertical, halves, strips or with_features"
    )
    stranger = "unknown feature for an input: 'rigth'; did you mean 'right'? (allowed: left, right)"
    assert refusal(feed, X, {"left": "alice", "rigth": "bob"}, PARTS) == stranger
    assert refusal(feed, X, {"rigth": "bob", "x": "alice"}, PARTS) == stranger
    # One role, but others of its inputs are parts.
    assert refusal(feed, X, {"left": "alice", "rigth": "alice"}, PARTS) == stranger


@pytest.mark.parametrize("count", [2, 4])
def test_columns_of_one_party_reach_no_other(count: int) -> None:
    data = breast_cancer().vertical(count)
    names = {name: name for name in data.features}
    before = feed(data.x, names, data.features)
    for column in range(30):
        x = data.x.clone()
        x[:, column] += 1
        after = feed(x, names, data.features)
        changed = [name for name in names if not torch.equal(before[name], after[name])]
        assert changed == [name for name, part in data.features.items() if column in part.positions]
        assert len(changed) == 1


def test_pixels_of_one_party_reach_no_other() -> None:
    data = mnist5k().rows(range(3)).strips(4)
    names = {name: name for name in data.features}
    before = feed(data.x, names, data.features)
    for pixel in range(28):
        x = data.x.clone()
        x[..., pixel] += 1
        after = feed(x, names, data.features)
        assert [name for name in names if not torch.equal(before[name], after[name])] == [f"party{pixel // 7}"]


def make() -> Dataset:
    return Dataset("toy", X, torch.tensor([0, 1]), classification(2))


def test_a_data_set_checks_and_keeps_features() -> None:
    data = make().with_features(PARTS)
    assert data.rows([1]).features == PARTS
    assert data.rows([1]).join([data.rows([0])]).features == PARTS
    assert data.with_features({"all": feature(list(range(6)))}).features.keys() == {"all"}
    assert make().features == {}
    assert refusal(make().with_features, {"far": feature([5, 6])}) == (
        "toy: feature 'far' reaches position 6; a row has positions 0 to 5"
    )
    assert refusal(make().with_features, {"": feature([0])}) == "toy: a feature has no name"
    assert refusal(Dataset, "toy", X, torch.tensor([0, 1]), classification(2), None, None, {"far": feature([6])}) == (
        "toy: feature 'far' reaches position 6; a row has positions 0 to 5"
    )
    assert refusal(data.join, [make()]) == (
        "toy has features ['left', 'right'] and toy []; expected parts of the same source"
    )


def test_clients_keep_features_and_targets() -> None:
    digits = mnist5k().rows(range(0, 5000, 25)).halves()
    split = digits.with_target("odd", digits.y % 2, classification(2)).clients(2, victims=4)
    assert split.features == digits.features
    assert list(split.tasks) == [None, "odd"]
    for client in split.clients:
        for part in (client.train, client.validation, client.test, split.test_union(), split.auxiliary):
            assert part.features == digits.features
            assert torch.equal(part.label("odd"), part.label() % 2)
            assert len(part) > 0
