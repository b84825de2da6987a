"""A data set checks what it is made of, and hands out rows with memory of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.rows import Draw, RowSource, read_rows
from splitfed.core.tasks import classification, regression
from splitfed.data import Dataset


def make(**changes: Any) -> Dataset:
    fields: dict[str, Any] = {
        "name": "toy",
        "x": torch.arange(8.0).reshape(4, 2) / 8,
        "y": torch.tensor([0, 1, 1, 0]),
        "task": classification(2),
    }
    return Dataset(**(fields | changes))


class Halves(RowSource):
    """The rows of `make`, read by index."""

    shape, dtype = (2,), torch.float32

    def __len__(self) -> int:
        return 4

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        return torch.arange(8.0).reshape(4, 2)[rows.tolist()] / 8


def test_what_it_says() -> None:
    data = make()
    assert len(data) == 4
    assert data.shape == (2,)
    assert repr(data) == "Dataset('toy', 4 rows of (2,), classification)"


def test_rows_are_copies_in_the_order_asked() -> None:
    data = make(domains=torch.tensor([7, 8, 9, 7]), value_range=(0.0, 1.0))
    part = data.rows(torch.tensor([2, 0]))
    assert part.x.tolist() == [[0.5, 0.625], [0.0, 0.125]]
    assert part.y.tolist() == [1, 0]
    assert part.domains is not None
    assert part.domains.tolist() == [9, 7]
    assert (part.name, part.value_range, part.task) == (data.name, data.value_range, data.task)
    part.x.zero_()
    assert data.x[2].tolist() == [0.5, 0.625]
    whole = data.rows(range(4))
    assert whole.x.untyped_storage().data_ptr() != data.x.untyped_storage().data_ptr()


def test_only_rows_may_be_empty() -> None:
    empty = make().rows([])
    assert len(empty) == 0
    assert empty.shape == (2,)
    with pytest.raises(InvalidInput, match=r"^toy: x has shape \(0, 2\) and type float32; expected"):
        make(x=torch.zeros(0, 2), y=torch.zeros(0, dtype=torch.int64))


def test_join_undoes_rows() -> None:
    data = make(domains=torch.arange(4))
    again = data.rows([0]).join([data.rows([]), data.rows([1, 2, 3])])
    assert torch.equal(again.x, data.x)
    assert torch.equal(again.y, data.y)
    assert again.domains is not None
    assert again.domains.tolist() == [0, 1, 2, 3]
    assert make().rows([0]).join([]).domains is None


@pytest.mark.parametrize("row", [-1, 4])
def test_no_such_row(row: int) -> None:
    with pytest.raises(InvalidInput, match=rf"^toy has no row {row}; expected 0 to 3$"):
        make().rows([0, row])


def mask_of(data: Dataset) -> list[Any]:
    """The same mask in every form that people give."""
    mask = data.y == 1
    return [mask, mask.tolist(), mask.numpy(), tuple(mask.tolist()), [np.bool_(one) for one in mask.tolist()]]


@pytest.mark.parametrize("form", range(5))
def test_truth_values_choose_the_rows_that_they_are_true_of(form: int) -> None:
    for data in (make(), make().rows([3, 1, 2]), make().with_mixup(), make(x=Halves())):
        mask = mask_of(data)[form]
        numbers = (data.y == 1).nonzero().flatten()
        for source in (data.rows(mask).source, data.source.select(mask)):
            assert torch.equal(read_rows("toy", source), data.x[numbers])
        assert data.rows(mask).y.tolist() == [1] * len(numbers)
    assert torch.equal(make(x=Halves()).source.take(torch.tensor([False, True, False, True])), make().x[[1, 3]])


NO_NUMBERS: list[Any] = [
    *([True, False, True], [True] * 5, torch.ones(3, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool)),
    *(np.ones(5, bool), [True, 2], [1.9], [1.0], torch.tensor([0.5, 2.9]), np.array([1.5]), [1, 2.5], 1, True),
    *([[0, 1]], torch.zeros(1, 1, dtype=torch.int64), [1j]),
]


@pytest.mark.parametrize("given", NO_NUMBERS, ids=repr)
def test_no_row_numbers_are_refused_in_a_line(given: Any) -> None:
    for data in (make(), make(x=Halves()), make().with_mixup()):
        for choose in (data.rows, data.source.select):
            with pytest.raises(InvalidInput, match=r"indices of rows have shape .*; expected \(rows,\) whole numbers,"):
                choose(given)


def test_sources_of_a_federation_are_row_numbers() -> None:
    split = make().clients(1, victims=1, auxiliary=1)
    with pytest.raises(InvalidInput, match=r"^sources\['victims'\] has shape \(2,\) and type bool; expected \(rows,\)"):
        replace(split, sources={**split.sources, "victims": torch.tensor([True, False])})


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"x": torch.zeros(4, 2, dtype=torch.float64)},
        "toy: x has shape (4, 2) and type float64; expected (rows, ...) with at least one row, and float32 or int64",
    ),
    (
        {"x": torch.zeros(4)},
        "toy: x has shape (4,) and type float32; expected (rows, ...) with at least one row, and float32 or int64",
    ),
    (
        {"x": torch.tensor([[0.0], [1.0], [float("nan")], [float("inf")]])},
        "toy: x is not finite in row 2, counted from 0",
    ),
    (
        {"x": torch.zeros(4, 2, device="meta")},
        "toy: x is on meta; expected cpu; batches are moved to a device when used",
    ),
    ({"y": torch.zeros(4, dtype=torch.int64, device="meta")}, "toy: y is on meta; expected cpu, like x"),
    ({"y": torch.tensor([0, 1])}, "toy: x has 4 rows and y has shape (2,); expected a label a row"),
    ({"y": torch.tensor(0)}, "toy: x has 4 rows and y has shape (); expected a label a row"),
    ({"y": torch.tensor([0, 1, 2, 0])}, "toy: label 2 is outside [0, 1]"),
    ({"y": torch.zeros(4)}, "toy: y has type float32; expected int64 for classification"),
    (
        {"y": torch.zeros(4, dtype=torch.float64), "task": regression()},
        "toy: y has type float64; expected int64 or float32 for regression",
    ),
    ({"value_range": (0.0, 0.5)}, "toy: x leaves its value range [0, 0.5] in row 2, counted from 0"),
    (
        {"value_range": (1.0, 1.0)},
        "toy: value_range=(1.0, 1.0) is not allowed; expected two numbers, low < high",
    ),
    (
        {"domains": torch.zeros(3, dtype=torch.int64)},
        "toy: domains have shape (3,) and type int64; expected (4,) and int64",
    ),
    ({"domains": torch.zeros(4)}, "toy: domains have shape (4,) and type float32; expected (4,) and int64"),
]


@pytest.mark.parametrize(("changes", "text"), BAD)
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make(**changes)
    assert str(caught.value) == text
