"""The ladder: every rung is an inverse network, and the adversary's own rows choose among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import splitfed
from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.ladder import Ladder
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import View
from splitfed.topologies import vanilla
from tests.attacks.examples import digits as federation
from tests.attacks.test_unsplit import trained
from tests.examples import InPlaceAfterCut, toy_data

SMALL = Ladder(widths=(2,), epochs=(1, 6), batch_size=16, queries=1)


@dataclass(frozen=True)
class Constant(Attack):
    """Guesses one grey for everybody, and counts the rows it was shown."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY})

    grey: float = 0.0
    shown: Any = None

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        assert knowledge.auxiliary is not None
        released = view.tensors()["relu1"]
        self.shown.append((len(released), len(knowledge.auxiliary)))
        return torch.full((len(released), *knowledge.shape), self.grey)


def test_the_rungs_are_every_width_with_every_budget() -> None:
    rungs = list(Ladder(widths=(4, 8), epochs=(1, 3), batch_size=7, lr=0.1, queries=2).rungs())
    wanted = [(4, 1), (4, 3), (8, 1), (8, 3)]
    assert rungs == [InverseNetwork(epochs=e, batch_size=7, lr=0.1, width=w, queries=2) for w, e in wanted]


def test_the_rows_of_the_adversary_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five greys the nearest to the mean of the data has the least squared error, whoever the victims are."""
    shown: list[tuple[int, int]] = []
    greys = (0.0, 0.3, 0.6, 0.8, 1.0)
    monkeypatch.setattr(Ladder, "rungs", lambda self: iter([Constant(grey, shown) for grey in greys]))
    mean = float(federation().auxiliary.x.mean())
    nearest = min(greys, key=lambda grey: abs(grey - mean))
    victims = federation().victims
    white = splitfed.Dataset("white", torch.ones_like(victims.x), victims.y, victims.task, victims.value_range)
    for rows in (victims, white):
        (result,) = trained().attack(Ladder(validation=0.25), victims=rows)
        assert result.prediction.shape == (24, 1, 8, 8)
        assert result.prediction.unique().tolist() == [pytest.approx(nearest)]
    assert set(shown) == {(24 + 100, 300)}


@pytest.mark.exhaustive
def test_the_larger_budget_wins_and_beats_the_mean_image() -> None:
    found: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for epochs in ((1,), (1, 15)):
        (result,) = trained().attack(Ladder(widths=(16,), epochs=epochs, batch_size=16, queries=1))
        found[epochs] = result.scores
    weak, strong = (found[e]["attack"]["psnr"].mean for e in ((1,), (1, 15)))
    # Both begin at the least-squares inverse, at 43 dB.
    assert strong > weak + 0.1
    assert strong > found[1, 15]["mean_image"]["psnr"].mean + 5.0


@pytest.mark.exhaustive
def test_one_rung_more_changes_none_of_those_before_it() -> None:
    """A second rung of a single epoch loses, and the winner guesses what it guesses alone."""
    ladders = [Ladder(widths=(2,), epochs=epochs, batch_size=16, queries=1) for epochs in ((6,), (6, 1))]
    one, two = (trained().attack(ladder)[0].prediction for ladder in ladders)
    assert torch.equal(one, two)


def test_too_few_auxiliary_rows() -> None:
    data = toy_data(60).clients(1, auxiliary=2, victims=8)
    run = splitfed.train(vanilla(InPlaceAfterCut(), "conv"), data, rounds=1)
    with pytest.raises(InvalidInput, match=re.escape("ladder validation=0.2 keeps 0 of 2 auxiliary rows")):
        run.attack(Ladder())
