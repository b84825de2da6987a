"""Arrays, tensors and torch data sets become data sets: types, tasks, copies and refusals."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import binary, classification, regression
from splitfed.data import Dataset, from_arrays, from_torch

X = np.arange(6, dtype=np.float64).reshape(3, 2)


def test_whole_labels_mean_classes() -> None:
    data = from_arrays(X, np.array([0, 2, 1], dtype=np.uint16))
    assert (data.task.name, data.task.outputs, data.name) == ("classification", 3, "arrays")
    assert data.x.tolist() == X.tolist()
    assert (data.x.dtype, data.y.dtype) == (torch.float32, torch.int64)
    # One class only is still a classification of two.
    assert from_arrays(X, np.zeros(3, dtype=int)).task.outputs == 2
    assert from_arrays(X, np.array([True, False, True])).y.tolist() == [1, 0, 1]


def test_real_labels_mean_regression() -> None:
    data = from_arrays(X, np.array([[0.5, 1.0], [1.0, 2.0], [2.0, 4.0]]))
    assert (data.task.name, data.task.outputs) == ("regression", 2)
    assert data.y.dtype == torch.float32
    assert from_arrays(X, np.array([0.5, 1.0, 2.0])).task.outputs == 1


@pytest.mark.parametrize("task", [binary(), "binary"])
def test_binary_when_asked(task: Any) -> None:
    data = from_arrays(X, np.array([0.0, 1.0, 1.0]), task=task)
    assert (data.task.name, data.task.outputs, data.y.tolist()) == ("binary", 1, [0, 1, 1])
    assert data.y.dtype == torch.int64


def test_regression_of_whole_numbers_when_asked() -> None:
    data = from_arrays(X, np.array([3, 40, 5]), task="regression")
    assert (data.task.name, data.y.tolist(), data.y.dtype) == ("regression", [3.0, 40.0, 5.0], torch.float32)


def test_a_column_is_a_row_of_one() -> None:
    data = from_arrays(np.array([1.0, 2.0]), np.array([[0], [1]]))
    assert data.x.tolist() == [[1.0], [2.0]]
    assert data.y.tolist() == [0, 1]


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_rows_are_shared_and_labels_copied(convert: Any) -> None:
    x, y = convert(X.astype(np.float32)), convert(np.array([0, 1, 0]))
    data = from_arrays(x, y, domains=y)
    assert data.x.data_ptr() == torch.as_tensor(x).data_ptr()
    codes = convert(np.arange(6).reshape(3, 2))
    assert from_arrays(codes, y, dtype="int64").x.data_ptr() == torch.as_tensor(codes).data_ptr()
    # Another type is converted.
    assert from_arrays(convert(X), y).x.tolist() == X.tolist()
    y[0] = 1
    assert data.domains is not None
    assert (int(data.y[0]), int(data.domains[0])) == (0, 0)


@pytest.mark.parametrize("domains", [[0, 0.25, 0.5], [0, 1, float("nan")], [0, 1, float("inf")], [0, 1, 1e300]])
def test_domains_are_whole_numbers(domains: list[float]) -> None:
    with pytest.raises(
        InvalidInput, match=r"^arrays: domains holds .* in row \d, counted from 0; .*expects whole numb"
    ):
        from_arrays(X, np.arange(3), domains=np.array(domains))
    found = from_arrays(X, np.arange(3), domains=np.array([0.0, 5.0, 2.0])).domains
    assert found is not None
    assert found.tolist() == [0, 5, 2]


@pytest.mark.parametrize("columns", [[0, 1], ["a", "a"], ["a", ""], "ab", ["a", None], [b"a", b"b"], ["a"], "aa"])
def test_names_of_columns_are_told_apart(columns: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^(arrays: .*columns|columns='(ab|aa)' is not allowed; expected a list)"):
        from_arrays(X, np.arange(3), columns=columns)
    assert from_arrays(X, np.arange(3), columns=("a", "b")).columns == ("a", "b")


@pytest.mark.parametrize("outputs", [1, 2, 5])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2), (3, 5), (3, 2, 2)])
def test_targets_are_as_many_as_the_outputs_of_a_regression(outputs: int, shape: tuple[int, ...]) -> None:
    y, task = np.ones(shape, np.float32), regression(outputs)
    if (given := int(np.prod(shape[1:]))) == outputs:
        assert from_arrays(X, y, task=task).task is task
    else:
        with pytest.raises(
            InvalidInput, match=rf"^arrays: y has .* {given} targets a row, and the task outputs={outputs};"
        ):
            from_arrays(X, y, task=task)
        # A loss of one's own may read more of a row than it predicts.
        from_arrays(X, y, task=task.with_loss(lambda output, y: output.sum()))


NO_MEMORY = {
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x.to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NO_MEMORY)
def test_tensors_whose_numbers_do_not_lie_in_memory_are_refused(kind: str) -> None:
    x, y, made = torch.rand(3, 2), torch.arange(3), NO_MEMORY[kind]
    text = rf"^.*: '?[xy]'? is (a {kind} tensor; expected a dense one, whose numbers are in mem|on meta; expected cpu)"
    for make in (
        lambda: from_arrays(made(x), y),
        lambda: from_arrays({"x": made(x)}, y),
        lambda: from_arrays(x, made(x)),
        lambda: Dataset("toy", made(x), y, classification(3)),
        lambda: Dataset("toy", x, made(x), regression(2)),
    ):
        with pytest.raises(InvalidInput, match=text):
            make()


@pytest.mark.parametrize("task", [None, "classification"])
def test_codes_in_place_of_classes_are_refused(task: Any) -> None:
    with pytest.raises(
        InvalidInput, match=r"^label 1000000000002 of y implies more than 16777216 classes; number them fr"
    ):
        from_arrays(X, np.arange(3) + 10**12, task=task)


def test_arrays_as_they_come() -> None:
    big_endian = X.astype(">f8")[::-1]
    big_endian.flags.writeable = False
    assert from_arrays(big_endian, np.array([0, 1, 0])).x.tolist() == X[::-1].tolist()
    grown = torch.ones(3, 2, requires_grad=True)
    assert not from_arrays(grown, torch.tensor([0, 1, 0])).x.requires_grad


BAD: list[tuple[Any, Any, dict[str, Any], str]] = [
    (X.tolist(), np.zeros(3), {}, "arrays: x is a list; expected a tensor, an array or a number"),
    (X.astype(str), np.zeros(3), {}, "arrays: x has type <U32; expected real numbers"),
    (X, torch.zeros(3, dtype=torch.complex64), {}, "arrays: y is complex; expected real numbers"),
    (X, np.zeros(0), {}, "arrays: y has shape (0,); expected at least one label"),
    (X, np.zeros(2), {}, "arrays: x has 3 rows and y has shape (2,); expected a label a row"),
    (X, np.array([0, 1, -1]), {}, "arrays: label -1 is outside [0, 1]"),
    (X, np.array([0, 0.5, 1]), {"task": "binary"}, "labels must be whole numbers in [0, 1]; found 0.5"),
    (X * 1e300, np.zeros(3), {"name": "big"}, "big: x is not finite in row 0, counted from 0"),
    (
        X,
        np.zeros(3),
        {"task": "binry"},
        "unknown task 'binry'; did you mean 'binary'? (allowed: binary, classification, regression)",
    ),
]


@pytest.mark.parametrize(("x", "y", "options", "text"), BAD)
def test_refused(x: Any, y: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_arrays(x, y, **options)
    assert str(caught.value) == text


def test_from_torch() -> None:
    source = TensorDataset(torch.arange(12.0).reshape(3, 2, 2), torch.tensor([1, 0, 1]))
    data = from_torch(source, value_range=(0.0, 11.0), name="mine")
    assert (data.name, data.shape, data.y.tolist(), data.task.outputs) == ("mine", (2, 2), [1, 0, 1], 2)
    assert data.x.flatten().tolist() == list(range(12))
    mixed = from_torch([(np.ones(2, dtype=np.float32), 0.5), (np.zeros(2, dtype=np.float32), 1.5)])
    assert (mixed.task.name, mixed.y.tolist()) == ("regression", [0.5, 1.5])


BAD_ITEMS: list[tuple[Any, str]] = [
    (iter([]), "torch: list_iterator has no length and no items by number; expected both"),
    ([], "torch: the data set is empty; expected at least one item"),
    ([torch.zeros(2)], "torch: item 0 is a Tensor; expected a pair (x, y)"),
    ([("text", 0)], "torch: x of item 0 is a str; expected a tensor, an array or a number"),
    (
        [(torch.zeros(2), 0), (torch.zeros(3), 0)],
        "torch: x of item 1 has shape (3,); expected (2,) as in item 0",
    ),
]


@pytest.mark.parametrize(("items", "text"), BAD_ITEMS)
def test_items_refused(items: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_torch(items)
    assert str(caught.value) == text


def test_labels_that_leave_most_classes_empty_are_warned_of() -> None:
    """Two labels made a million classes and one."""
    x, y = torch.rand(4, 2), torch.tensor([0, 1_000_000, 0, 1_000_000])
    with pytest.warns(UserWarning, match="which makes 1000001 classes, of which 999999 are empty"):
        from_arrays(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_arrays(x, y, task="classification")
        from_arrays(x, torch.tensor([0, 3, 9, 1]))


def test_one_hot_labels_are_no_regression_without_a_word() -> None:
    hot = np.eye(3)[[0, 2, 1]]
    with pytest.warns(UserWarning, match=r"y has one-hot rows, \(n, 3\) .*regression; give y\.argmax\(1\) for classes"):
        assert from_arrays(X, hot).task.name == "regression"
    for y, task in ((hot, "classification"), (hot.astype(int), None)):
        with pytest.raises(InvalidInput, match=r"arrays: y has one-hot rows.*expected a class a row: give y\.argmax"):
            from_arrays(X, y, task=task)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_arrays(X, hot.argmax(1)).task.outputs == 3
        from_arrays(X, hot, task="regression")
        assert from_arrays(X, hot.astype(int), task="regression").y.tolist() == hot.tolist()
        from_arrays(X, np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]]))


@pytest.mark.parametrize("shape", [(4, 28, 28, 1), (4, 32, 24, 3)])
def test_images_with_their_channels_last_are_told(shape: tuple[int, ...]) -> None:
    """They trained as images of 28 channels, a pixel wide."""
    text = (
        rf"x has shape \(4, {shape[1]}, .*\), which is read as {shape[1]} channels of .*give x\.permute\(0, 3, 1, 2\)"
    )
    with pytest.warns(UserWarning, match=text):
        from_arrays(np.zeros(shape, dtype=np.float32), np.array([0, 1, 0, 1]))
    with pytest.warns(UserWarning, match=text):
        from_torch([(np.zeros(shape[1:], dtype=np.float32), i % 2) for i in range(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in ((4, 1, 28, 28), (4, 3, 3, 3), (4, 12, 1000, 1), (4, 64, 1, 1)):
            from_arrays(np.zeros(other, dtype=np.float32), np.array([0, 1, 0, 1]))


def test_whole_numbers_that_float32_rounds_are_refused() -> None:
    """Ids side by side became one."""
    ids = torch.tensor([[2**24], [2**24 + 1]])
    with pytest.raises(InvalidInput, match="x holds 16777217 in row 1, counted from 0, which float32 cannot represent"):
        from_arrays(ids, torch.tensor([0, 1]))
    assert from_arrays(ids, torch.tensor([0, 1]), dtype="int64").x.flatten().tolist() == ids.flatten().tolist()
