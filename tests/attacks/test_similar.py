"""Similarity to known rows and clusters of gradients: planted and hopeless worlds, short rows, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.base import Knowledge
from splitfed.attacks.labels.similar import Similar, short_rows
from splitfed.attacks.scoring.label_metrics import score_labels
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator
from splitfed.threats.attack_result import AttackResult
from tests.attacks.examples import drowned, summed, two_party, u_digits

ROWS, CLASSES = 120, 4
Y = torch.arange(ROWS) % CLASSES
HINTS = {c: torch.tensor([c]) for c in range(CLASSES)}
MEANS = replace(Similar(), method="k-means")


def view(rows: Tensor, module: nn.Module | None = None) -> View:
    message = Message("s", "left", "gradient", "e", {"z": rows / len(rows)}, Stamp("rehearse", 0, 0, 0))
    return View("left", (message,), {} if module is None else {"bottom": module})


def directions(spread: float = 0.1) -> Tensor:
    """Rows along the direction of their class, of lengths over four orders: a model that is more or less sure."""
    drawn = generator(0)
    centers = torch.randn(CLASSES, 8, generator=drawn)
    lengths = 10 ** (4 * torch.rand(ROWS, 1, generator=drawn) - 3)
    return lengths * (centers[Y] + spread * torch.randn(ROWS, 8, generator=drawn))


def predict(attack: Similar, seen: View, hints: Any = HINTS, **known: Any) -> Tensor:
    return attack(seen, Knowledge((4,), classes=CLASSES, hints=hints, **known), generator(0)).prediction


def accuracy(scores: Tensor) -> float:
    return float((scores.argmax(1) == Y).double().mean())


@pytest.mark.parametrize("attack", [Similar(), MEANS], ids=["distance", "k-means"])
def test_the_direction_of_a_gradient_tells_its_class_however_short_it_is(attack: Similar) -> None:
    assert accuracy(predict(attack, view(directions()))) == 1.0
    assert accuracy(predict(replace(attack, measure="euclidean"), view(directions()))) < 0.8


def test_the_most_similar_known_row_counts() -> None:
    """Class 0 is known by two rows a right angle apart; a row along the second belongs to it."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.1, 2.0], [-3.0, -0.1]])
    found = Similar()(
        view(rows),
        Knowledge((4,), classes=2, hints={0: torch.tensor([0, 1]), 1: torch.tensor([2])}),
        generator(0),
    ).prediction
    assert found.argmax(1).tolist() == [0, 0, 1, 0, 1]
    assert found[3].tolist() == pytest.approx([2 / 4.01**0.5, -0.1 / 4.01**0.5])


def test_rows_of_others_say_nothing() -> None:
    """Rows shuffled: 116 that are not known, of four classes, have a deviation of .04."""
    shuffled = directions()[torch.randperm(ROWS, generator=generator(4))]
    for attack in (Similar(), MEANS):
        left = torch.arange(CLASSES, ROWS)
        found = (predict(attack, view(shuffled)).argmax(1) == Y)[left]
        assert abs(float(found.double().mean()) - 0.25) < 0.16


def test_without_known_rows_clusters_are_found_and_have_no_names() -> None:
    blind = replace(MEANS, hints=0)
    assert not blind.names_classes
    assert blind.asks(CLASSES) == {}
    scores = predict(blind, view(directions()), hints={})
    found = score_labels(Y, scores, torch.zeros(0), generator(0), named=blind.names_classes)
    assert found["attack"]["assigned_accuracy"].mean == 1.0
    assert found["permutation_null"]["assigned_accuracy"].high < 0.5


def score(attack: Similar, world: Any, party: str) -> AttackResult:
    (result,) = world().attack(attack, adversary=party)
    return result


def test_in_runs_it_finds_labels_and_in_noise_none() -> None:
    assert score(MEANS, u_digits, "server").scores["attack"]["accuracy"].mean > 0.95
    assert score(Similar(), two_party, "left0").scores["attack"]["auc"].mean > 0.95
    blind = score(replace(MEANS, hints=0), lambda: drowned(summed), "left0")
    null = blind.scores["permutation_null"]["assigned_accuracy"]
    assert blind.scores["attack"]["assigned_accuracy"].mean < null.high + 0.05


def test_what_the_party_sent_is_compared_as_well() -> None:
    """Rows that differ only in what was sent; the gradients are equal."""
    x = torch.eye(4)[Y] + 0.01 * torch.randn(ROWS, 4, generator=generator(1))
    module = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.eye(4))
    seen = view(torch.ones(ROWS, 4), module)
    for measure in ("cosine", "euclidean"):
        attack = Similar(rows="sent", measure=measure)
        assert accuracy(predict(attack, seen, own={"left": x})) == 1.0
    assert accuracy(predict(Similar(), seen)) == 0.25


def test_rows_too_short_to_have_a_direction_are_counted() -> None:
    rows = torch.cat([torch.ones(9, 3), 1e-4 * torch.ones(1, 3)])
    assert short_rows(rows) == pytest.approx(0.1)
    assert short_rows(torch.ones(4, 3)) == 0.0
    # Ten times below the floor: a tenth of the similarity that its direction would have.
    found = Similar()(
        view(rows), Knowledge((4,), classes=2, hints={0: torch.tensor([0]), 1: torch.tensor([1])}), generator(0)
    ).prediction
    assert float(found[9, 0]) == pytest.approx(0.1, rel=1e-4)


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match=re.escape("similar hints=0 is not allowed with method 'distance'")):
        Similar(hints=0)
    with pytest.raises(InvalidInput, match="unknown similar method 'means'; did you mean 'k-means'"):
        Similar(method="means")
    with pytest.raises(
        InvalidInput, match="similar needs a known victim of each of 4 classes to assign clusters to classes"
    ):
        predict(Similar(), view(directions()), hints={0: torch.tensor([0])})
    with pytest.raises(InvalidInput, match="similar needs as many victims as clusters, 4; there are 2"):
        predict(replace(MEANS, hints=0), view(torch.ones(2, 3)), hints={})
