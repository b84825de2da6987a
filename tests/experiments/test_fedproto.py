"""The table of FedProto: a tiny cell, scores among own classes, verdicts, and cells that cannot be measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.papers import fedproto, installed
from experiments.papers.fedproto import (
    HEADED,
    NEAREST,
    NEAREST_OWN,
    OWN,
    Setting,
    _key,
    claimed,
    measure,
    own_accuracies,
)
from experiments.papers.fedproto_models import WIDTH, cnn, narrow_lenet
from experiments.papers.table import Cell

TINY = Setting(rounds=1, rows=4, test=0.25, batch=16, rate=0.02, shift=0.1307, scale=0.3081)


@pytest.mark.exhaustive
@pytest.mark.parametrize("called", ["FedAvg", "FedProto mh"])
def test_a_tiny_cell(called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fedproto.SETTINGS, "MNIST", TINY)
    found = measure("MNIST", 3, called, 0, tmp_path, rounds=1, every=1)
    assert found["rows"] == pytest.approx(3.0, abs=0.35)
    assert len(found["curve"]) == 1
    assert found["curve"][0] == [1, pytest.approx(found["scores"][HEADED]["mean"])]
    if called == "FedAvg":
        assert set(found["scores"]) == {HEADED, OWN}
        # A CNN of 21 840 parameters goes to 20 clients and back.
        assert found["MiB"] * 2**20 == pytest.approx(2 * 20 * 21840 * 4, rel=0.01)
    else:
        assert set(found["scores"]) == {HEADED, OWN, NEAREST_OWN, NEAREST}
        # Nothing is known in the first round; up go 50 numbers and a count for each class that a client holds.
        assert found["MiB"] * 2**20 >= 20 * found["classes"] * (50 * 4 + 8)


def test_both_makes_of_mh_and_one_of_the_others() -> None:
    kinds = [cnn(), narrow_lenet()]
    widths = {topology.segments[0].module(torch.zeros(2, 1, 28, 28)).shape for topology in kinds}
    assert widths == {(2, WIDTH)}
    assert sum(p.numel() for segment in kinds[0].segments for p in segment.module.parameters()) == 21840


def test_own_accuracy_chooses_among_a_clients_own_classes() -> None:
    # The head prefers class 0, which the client does not hold; among 1 and 3 it is right in one row of two.
    scores = torch.tensor([[9.0, 2.0, 8.0, 1.0], [9.0, 2.0, 8.0, 1.0]])
    client = SimpleNamespace(
        train=SimpleNamespace(y=torch.tensor([1, 3, 3])), test=SimpleNamespace(x=None, y=torch.tensor([1, 3]))
    )
    run: Any = SimpleNamespace(data=SimpleNamespace(clients=[client]), predict=lambda x, replica: scores)
    assert own_accuracies(run) == [0.5]


@pytest.mark.parametrize(
    ("better", "word"),
    [
        ([1.0, 1.1, 0.9], "confirmed"),
        ([-1.0, -1.1, -0.9], "contradicted"),
        ([1.0, -1.0, 0.5], "not settled"),
    ],
)
def test_verdicts_follow_from_the_interval(better: list[float], word: str) -> None:
    assert claimed(better).endswith(f": {word}")
    assert claimed(better[:1]) == f"{better[0]:+.1f}"


def entry(head: float, own: float, prototype: float | None = None) -> dict[str, Any]:
    values = {HEADED: head, OWN: own} | ({NEAREST_OWN: prototype, NEAREST: prototype} if prototype else {})
    scores = {name: {"mean": value, "std": 100 - value} for name, value in values.items()}
    return {
        "scores": scores,
        "curve": [[5, head - 4], [15, head - 2], [20, head - 1], [21, head]],
        "MiB": 0.5,
        "rows": 26.0,
        "classes": 3.35,
    }


def test_what_is_shown_of_some_cells() -> None:
    done = {}
    for seed, shift in enumerate((0.0, 0.1, 0.2)):
        done[_key("MNIST", 3, "alone", seed)] = entry(90 + shift, 90 + shift)
        done[_key("MNIST", 3, "FedAvg", seed)] = entry(80 + shift, 92 + shift)
        done[_key("MNIST", 3, "FedProto", seed)] = entry(91 - 5 * shift, 91, 85 + 2 * shift)
    text = fedproto.show(done)
    assert "| FedAvg | head | 80.1 (79.9 to 80.3), ± 19.9 |  |  | 95.04 / 94.32 / 93.22 | 0.500 |" in text
    assert f"| FedProto ({NEAREST_OWN}) than alone (head) | -4.9 (-5.1 to -4.7): contradicted |  |  |" in text
    assert f"| FedProto ({NEAREST_OWN}) than FedAvg (head) | +5.1 (4.9 to 5.3): confirmed |  |  |" in text
    assert "| FedProto (head) than alone (head) * | +0.4 (-1.1 to 1.9): not settled |  |  |" in text
    assert "| FedProto closer together than FedAvg (deviation over clients) | +5.1 (4.9 to 5.3): confirmed |" in text
    assert "n = 3: 3.35 classes, 26 rows of each to train on" in text
    assert "alone +2.0 in 6 rounds, FedAvg +2.0 in 6 rounds, FedProto +2.0 in 6 rounds." in text
    assert "Fashion-MNIST |" not in text


def test_cells_of_images_that_are_not_installed_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "FASHION", tmp_path / "nothing")
    cells = tuple(Cell(f"alone | {name}", lambda state: {"found": 1}) for name in ("MNIST", "Fashion-MNIST"))
    table = installed.WhereInstalled("toy", "A toy", "", cells, lambda done: "")
    told: list[str] = []
    table.complete(tmp_path, told.append)
    assert list(table.measured(tmp_path)) == ["alone | MNIST"]
    assert told[0] == f"toy: left out 1 cells: no {tmp_path}/nothing (dataset-fashion-mnist)"
    monkeypatch.setattr(installed, "FASHION", tmp_path)
    table.complete(tmp_path, told.append)
    assert len(table.measured(tmp_path)) == 2
