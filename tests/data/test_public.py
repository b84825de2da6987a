"""Public rows: a part of a client's training rows, by class, beside the same training rows as without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import classification
from splitfed.data import ClientData, Dataset, Federation
from splitfed.poisoning import LabelFlip
from splitfed.training.identity import digest


def toy(rows: int = 100, **options: Any) -> Federation:
    x, y = torch.arange(float(rows))[:, None], torch.arange(rows) % 5
    return Dataset("toy", x, y, classification(5)).clients(2, victims=0, auxiliary=0, **options)


def test_nobody_shows_anything_unless_asked() -> None:
    assert [len(client.public) for client in toy().clients] == [0, 0]
    client = toy().clients[0]
    assert len(ClientData("a", client.train, client.validation, client.test).public) == 0


def test_public_rows_are_a_share_of_all_and_in_training() -> None:
    # 50 rows a client, of which 5 validate, 10 test and 35 train: a fifth of all, 10, are shown, two of each class or
    # so, as the 35 have 5 to 9 of each.
    shown, hidden = toy(public=0.2), toy()
    for client, other in zip(shown.clients, hidden.clients, strict=True):
        assert torch.equal(client.train.x, other.train.x)
        assert len(client.public) == 10
        assert set(client.public.x.flatten().tolist()) < set(client.train.x.flatten().tolist())
        counts, among = client.public.y.bincount(minlength=5), client.train.y.bincount(minlength=5)
        assert float((counts - among * 10 / 35).abs().max()) < 1
        public, train = client.public.x, client.train.x
        assert public.untyped_storage().data_ptr() != train.untyped_storage().data_ptr()
    assert shown.sources.keys() == hidden.sources.keys()


def test_all_training_rows_may_be_shown() -> None:
    assert [len(client.public) for client in toy(public=0.7).clients] == [35, 35]


@pytest.mark.parametrize(
    ("public", "text"),
    [
        (-0.1, r"^public=-0.1 is not allowed; expected a number in \[0, 1\]$"),
        (0.8, r"^public=0.8 is more than validation=0.1 and test=0.2 leave for training; expected at most 0.7$"),
    ],
)
def test_refused(public: float, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        toy(public=public)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (torch.tensor([0, 35]), r"^client0: shown has no row 35; expected 0 to 34$"),
        (torch.tensor([3, 3]), r"^client0: shown has a row twice; expected training rows, each once$"),
        (
            torch.tensor([1.0]),
            r"^client0: shown: indices of rows have shape \(1,\) and are float32; expected \(rows,\) whole",
        ),
    ],
)
def test_shown_rows_are_training_rows(shown: torch.Tensor, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        replace(toy().clients[0], shown=shown)


def test_who_misbehaves_shows_what_it_trains_on() -> None:
    data = toy(public=0.2)
    poisoned = LabelFlip(clients=(0,)).poison(data, 0)
    assert not torch.equal(poisoned.clients[0].public.y, data.clients[0].public.y)
    assert torch.equal(poisoned.clients[0].public.y, poisoned.clients[0].train.y[data.clients[0].shown])
    assert digest({"x": poisoned.clients[1].public.x}) == digest({"x": data.clients[1].public.x})
