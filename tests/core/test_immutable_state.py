"""Immutable values that a model replaces in training, of classes that no checkpoint holds, are refused by name."""

from __future__ import annotations

import datetime
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.topologies import vanilla
from tests.thinning import thin

Change = Callable[[Any], Any]
NEXT = {math.sin: math.cos, math.cos: math.tan, math.tan: math.exp, math.exp: math.sqrt, math.sqrt: math.sin}
CHANGES: dict[str, tuple[Any, Change, Callable[[Any], float]]] = {
    "decimal": (Decimal(1), lambda one: one * Decimal("0.9"), float),
    "fraction": (Fraction(1), lambda one: one * Fraction(9, 10), float),
    "duration": (
        datetime.timedelta(seconds=1),
        lambda one: one * 0.9,
        lambda one: float(one.total_seconds()),
    ),
    "date": (
        datetime.date(2020, 1, 1),
        lambda one: one + datetime.timedelta(1),
        lambda one: float(one.toordinal() - datetime.date(2020, 1, 1).toordinal()),
    ),
    "function": (math.sin, lambda one: NEXT[one], lambda one: float(one(1.0))),
    "pattern": (
        re.compile("a"),
        lambda one: re.compile(one.pattern + "a"),
        lambda one: 1 / len(one.pattern),
    ),
    "getter": (
        operator.itemgetter(0),
        lambda one: operator.itemgetter(1 - one.__reduce__()[1][0]),
        lambda one: float(one((0.5, 1.0))),
    ),
}


class Scaled(nn.Module):
    """A model whose output is scaled by a value that every forward pass in training replaces."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h = nn.Linear(4, 5), nn.Linear(5, 3)
        self.state, self.change, self.number = CHANGES[name]

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x).relu()
        if self.training:
            self.state = self.change(self.state)
        return self.h(z) * self.number(self.state)


@pytest.mark.parametrize("name", thin(CHANGES, 3))
@pytest.mark.parametrize("by_example", [True, False])
def test_what_replaces_an_immutable_value_is_refused_before_training(name: str, by_example: bool) -> None:
    x = torch.randn(8, 4)
    with pytest.raises(InvalidInput, match=r"attribute 'state'|of 'state'|behaves otherwise in training"):
        vanilla(Scaled(name), "a", example=x) if by_example else vanilla(Scaled(name), "a")


@pytest.mark.parametrize("name", thin(CHANGES, 3))
def test_a_segment_made_by_hand_is_refused_before_its_state_is_lost(name: str, tmp_path: Path) -> None:
    """Where no rehearsal tells, the first checkpoint does."""
    topology = sf.topologies.custom(
        [
            {"name": "bottom", "role": "client", "module": Scaled(name), "inputs": ["x"]},
            {"name": "top", "role": "server", "module": nn.Linear(3, 3), "inputs": ["bottom"]},
        ],
        inputs={"x": "client"},
        heads=[{"value": "top", "labels": "client"}],
    )
    rows = sf.data.from_arrays(torch.randn(30, 4).numpy(), (torch.arange(30) % 3).numpy())
    with pytest.raises(InvalidInput, match="state"):
        sf.train(
            topology, rows.clients(1, auxiliary=0, victims=0), rounds=1, logging=sf.Logging(folder=tmp_path / "run")
        )
