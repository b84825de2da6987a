"""What training sees of a row follows from the seed, the row and the epoch alone; mixup stays inside a client."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.rows import Draw
from splitfed.data import Dataset, from_arrays
from tests.examples import toy_data

X = np.arange(40, dtype=np.float32).reshape(20, 2)


def shift(row: Tensor, drawn: torch.Generator) -> Tensor:
    return row + torch.rand(row.shape, generator=drawn)


def rows(x: np.ndarray = X) -> Dataset:
    return from_arrays(x, np.arange(len(x)) % 2)


def test_a_draw_depends_on_seed_row_and_epoch_alone() -> None:
    data = rows().with_transform(shift)
    every = data.source.take(torch.arange(20), Draw(3, 1))
    moved = every - torch.from_numpy(X)
    assert bool(((moved >= 0) & (moved < 1)).all())
    assert len(moved.unique()) == 40
    # Whatever is asked for beside it, in which order, and through whichever part.
    some = torch.tensor([7, 2, 7])
    assert torch.equal(data.source.take(some, Draw(3, 1)), every[some])
    client = data.clients(2, victims=2, seed=5).clients[1].train
    numbers = data.clients(2, victims=2, seed=5).sources["client1/train"]
    assert torch.equal(client.source.take(torch.arange(len(client)), Draw(3, 1)), every[numbers])
    for other in (Draw(4, 1), Draw(3, 2)):
        assert not bool((data.source.take(torch.arange(20), other) == every).any())
    assert torch.equal(data.x, torch.from_numpy(X))
    assert torch.equal(data.source.take(some), torch.from_numpy(X)[some])


def test_the_default_generators_are_seeded_and_put_back() -> None:
    def draw(row: Tensor) -> Tensor:
        return row + torch.rand(1) + random.random() + float(np.random.rand())  # noqa: NPY002

    data = rows().with_transform(draw)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    found = data.source.take(torch.tensor([4]), Draw(0, 0))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    torch.manual_seed(1)
    random.seed(1)
    assert torch.equal(data.source.take(torch.tensor([4]), Draw(0, 0)), found)


CALLS = itertools.count()
BAD: list[tuple[Any, str]] = [
    ("flip", "arrays: transform is a str; expected a function of a row"),
    (lambda row: row[:1], "arrays: transform of row 0 returned (1,) of float32; expected (2,) of float32"),
    (lambda row: row.double(), "arrays: transform of row 0 returned (2,) of float64; expected (2,) of float32"),
    (lambda row: None, "arrays: transform of row 0 returned NoneType; expected (2,) of float32"),
    (lambda row: row + next(CALLS), "arrays: transform returned two results for one row and one seed"),
    (lambda row: row / "2", "arrays: transform of row 0 failed: TypeError"),
    (lambda row: {}["row"], "arrays: transform of row 0 failed: KeyError: 'row'"),
]


@pytest.mark.parametrize(("transform", "text"), BAD)
def test_a_transform_that_cannot_be_repeated_is_refused(transform: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        rows().with_transform(transform)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_what_goes_with_what() -> None:
    with pytest.raises(InvalidInput, match="has a transform already"):
        rows().with_transform(shift).with_transform(shift)
    with pytest.raises(InvalidInput, match="mixup, which comes last"):
        rows().with_mixup(0.2).with_transform(shift)
    with pytest.raises(InvalidInput, match="has a mixup already"):
        rows().with_mixup(0.2).with_mixup(0.2)
    with pytest.raises(InvalidInput, match=r"^mixup=0 is not allowed"):
        rows().with_mixup(0)
    with pytest.raises(InvalidInput, match="rows of whole numbers"):
        from_arrays(X, np.arange(20) % 2, dtype="int64").with_mixup(0.2)


def test_mixup_mixes_rows_of_one_client() -> None:
    """Rows of client i are all i: a mixture of rows of two clients would be no whole number."""
    data = rows(np.repeat(np.arange(20, dtype=np.float32), 2).reshape(20, 2)).with_mixup(1.0)
    for made in (data, replace(data, domains=torch.zeros(20, dtype=torch.int64))):
        parts = made.clients(2, victims=2, auxiliary=2, validation=0, test=0, seed=1)
        mixed, holders = [], []
        for client in parts.clients:
            plain = client.train.x
            seen = client.train.source.take(torch.arange(len(plain)), Draw(0, 0))
            assert not torch.equal(seen, plain)
            # With the own value a, every mixture is a convex combination of a and some b of the same client.
            assert float(seen.min()) >= float(plain.min())
            assert float(seen.max()) <= float(plain.max())
            mixed.append(seen)
            holders.append(plain)
        alone = from_arrays(holders[0].numpy(), np.zeros(len(holders[0]), dtype=int)).with_mixup(1.0).source
        numbers = parts.sources["client0/train"]
        again = type(alone)("a", alone.source, 1.0, numbers)  # type: ignore[attr-defined, call-arg]
        assert torch.equal(again.take(torch.arange(len(numbers)), Draw(0, 0)), mixed[0])


def test_mixup_has_the_gradient_of_the_paper() -> None:
    """Own label alone and Beta(a + 1, a), against both labels and Beta(a, a): the same mean gradient of a linear model.

    With x and y of mean zero among pairs (i, j), the gradient of the squared error at w = 0 is -2 E[mixed x * label];
    by hand, E over the paper's draw is -2 E[(l x_i + (1-l) x_j)(l y_i + (1-l) y_j)] = -2 (E l^2 + E (1-l)^2) E[x y]
    - 4 E[l (1-l)] E[x] E[y], and for own labels -2 (E l E[x y] + E (1-l) E[x] E[y]) with l from Beta(a + 1, a): both
    have E l = (a + 1) / (2 a + 1) = E l^2 + E (1-l)^2 under Beta(a, a).
    """
    alpha, count, epochs = 0.4, 400, 50
    x = torch.randn(count, 1, generator=torch.Generator().manual_seed(0))
    y = 3 * x.flatten() + 1
    source = Dataset("mix", x, (y > 0).long(), toy_data(4).task).with_mixup(alpha).source
    own = torch.stack([source.take(torch.arange(count), Draw(0, epoch)).flatten() for epoch in range(epochs)])
    share = (alpha + 1) / (2 * alpha + 1)
    expected = share * (x.flatten() * y).mean() + (1 - share) * x.mean() * y.mean()
    found = (own * y).mean(0).mean()
    # Each of 20000 terms has a standard deviation below 5: six standard errors are 0.21.
    assert abs(float(found - expected)) < 0.21
    without = (x.flatten() * y).mean()
    assert abs(float(found - without)) > 0.21
