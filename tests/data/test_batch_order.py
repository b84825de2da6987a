"""The order of rows: each row once an epoch, and a new order for each seed, epoch and party."""

from __future__ import annotations

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.data import batches


def test_each_row_once() -> None:
    found = list(batches(10, 4, seed=0, epoch=0))
    assert [len(batch) for batch in found] == [4, 4, 2]
    assert sorted(torch.cat(found).tolist()) == list(range(10))
    assert torch.equal(torch.cat(found), torch.randperm(10, generator=generator(0, "order", 0)))


def test_drop_last() -> None:
    assert [len(batch) for batch in batches(10, 4, 0, 0, drop_last=True)] == [4, 4]
    assert [len(batch) for batch in batches(8, 4, 0, 0, drop_last=True)] == [4, 4]
    assert list(batches(3, 4, 0, 0, drop_last=True)) == []
    assert list(batches(0, 4, 0, 0)) == []


def test_order_depends_on_seed_epoch_and_words_only() -> None:
    def order(*words: object) -> list[int]:
        return torch.cat(list(batches(50, 8, *words))).tolist()  # type: ignore[arg-type]

    assert order(0, 0, "client0") == order(0, 0, "client0")
    ways = [order(0, 0), order(1, 0), order(0, 1), order(0, 0, "client0"), order(0, 0, "client1")]
    assert len({tuple(way) for way in ways}) == 5


def test_refused_before_the_first_batch() -> None:
    with pytest.raises(InvalidInput, match=r"^batch size=0 is not allowed; expected a whole number of at least 1$"):
        batches(10, 0, 0, 0)
    with pytest.raises(InvalidInput, match=r"^count=-1 is not allowed"):
        batches(-1, 1, 0, 0)
