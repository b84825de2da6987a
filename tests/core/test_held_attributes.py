"""A party of a replayed model holds the attributes that its pass reads, and runs no code of another's submodules."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.held_arrays import held_arrays
from splitfed.core.replay import ReplayedSegment

ROWS = torch.linspace(-1.0, 1.0, 48).view(6, 8)


class Hiding(nn.Module):
    """A layer with an array that it reads, and rows in every place that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), np.linspace(1.0, 2.0, 8, dtype=np.float32)
        self.rows, self.listed, self.array = ROWS, ROWS.tolist(), ROWS.numpy()
        self.table, self.given, self.asked = {"x": [ROWS]}, partial(torch.add, ROWS), lambda x=ROWS: x
        self.weak = weakref.ref(ROWS)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h) * torch.from_numpy(self.scale)


class Net(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.head, self.train_x = first, second, nn.Linear(8, 4), ROWS

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(functional.dropout(self.first(x), 0.0, training=self.training)))


def pieces(first: nn.Module, second: nn.Module, at: str = "first") -> list[nn.Module]:
    drawn = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    found = [piece.module for piece in cut(Net(first, second), (at,), drawn)]
    assert all(isinstance(module, ReplayedSegment) for module in found)
    return found


def test_a_party_holds_the_attributes_that_its_pass_reads_and_no_others() -> None:
    for number, module in enumerate(pieces(Hiding(), Hiding())):
        own = ("first", "second")[number]
        assert [(one.name, one.shape) for one in held_arrays(module)] == [(f"'scale' of {own!r}", (8,))]
        assert "train_x" not in vars(module)
        other = module.get_submodule(("second", "first")[number])
        assert not {"scale", "rows", "listed", "array", "table", "given", "asked", "weak"} & set(vars(other))


class Reference(Hiding):
    """Leads to its own weight by a weak reference that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weak = weakref.ref(self.layer.weight)

    def forward(self, h: Tensor) -> Tensor:
        weight: Any = self.weak()
        return functional.linear(h, weight)


def test_a_weak_reference_to_a_weight_that_is_read_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'weak' of 'second' is a function or a reference that leads to a tensor"):
        pieces(nn.Linear(8, 8), Reference())


class Checked(nn.Module):
    """Looks at its numbers: for NaN, for its first batch, and for the nearest of its vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codes = nn.Linear(8, 8), nn.Parameter(torch.linspace(-1.0, 1.0, 40).view(5, 8))
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("started", torch.tensor(0))

    def forward(self, h: Tensor) -> Tensor:
        h = self.layer(h)
        if torch.isnan(h).any():
            raise ValueError("not a number")
        if self.started.item() == 0:
            with torch.no_grad():
                self.shift.copy_(-h.mean(0))
                self.started.fill_(1)
        h = h + self.shift
        used = torch.zeros(5)
        for code in torch.cdist(h, self.codes).argmin(1).unique().tolist():
            used[code] = 1.0
        return h + (self.codes * used[:, None]).sum(0)


@pytest.mark.parametrize("at", ["first", "second"])
def test_a_submodule_before_the_cut_may_look_at_its_numbers(at: str) -> None:
    pieces(Checked(), nn.Linear(8, 8), at)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, h: Tensor) -> tuple[Tensor, float]:
        h = self.layer(h)
        return h, float(h.sum())


class CountingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        h, total = self.first(x)
        return self.head(self.second(functional.dropout(h * total, 0.0, training=self.training)))


def test_a_number_that_such_a_submodule_returns_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"submodule 'first' of CountingNet .* returns the number"):
        cut(CountingNet(Counting(), nn.Linear(8, 8)), ("first",), torch.randn(8, 8))
