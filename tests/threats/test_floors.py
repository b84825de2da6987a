"""Floors and oracles beside every reconstruction: what they score, what they cost, and what is held to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.linear_inverse import LinearInverse
from splitfed.attacks.reconstruction.nearest import Nearest
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.reconstruction.strongest import Strongest
from splitfed.attacks.scoring import prediction_scores
from splitfed.attacks.scoring.prediction_scores import ORACLES, oracle_predictions, principal_reconstruction
from splitfed.attacks.scoring.reconstruction_metrics import score_reconstruction
from splitfed.attacks.training_time.fsha import Fsha
from splitfed.cli import main
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator
from splitfed.defenses import Noise
from splitfed.study.report.metrics import FLOORS as REPORTED_FLOORS, ORACLES as REPORTED_ORACLES
from splitfed.study.report.remarks import under_training
from splitfed.study.report.summary import summarise
from splitfed.study.results import AttackRecord
from splitfed.threats import floors
from splitfed.threats.floors import FLOORS, Floors, compared_floors, floors_above
from tests.attacks.examples import lenet_run, two_party, u_digits
from tests.study.examples import checked, small, write

QUICK = Rmle(iterations=2)


@dataclass(frozen=True)
class Grey(Attack):
    """Predicts one grey for every pixel, in the name of a decoder that it trained."""

    trains_decoder: ClassVar[bool] = True
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.QUERIES, Needs.AUXILIARY})
    grey: float = 0.5

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        released = next(iter(view.select(kind="activation").tensors().values()))
        return torch.full((len(released), *knowledge.shape), self.grey)


@dataclass(frozen=True)
class Untrained(Grey):
    """The same of an attack that trains nothing."""

    trains_decoder: ClassVar[bool] = False


def means(scores: Mapping[str, Any], metric: str = "mse") -> dict[str, float]:
    return {who: found[metric].mean for who, found in scores.items()}


def test_floors_are_the_attacks_of_the_same_names() -> None:
    """Beside another attack they score what these attacks score by themselves, to the bit."""
    run = lenet_run()
    (beside,) = run.attack(QUICK)
    found = means(beside.scores)
    alone = [run.attack(a)[0] for a in (LinearInverse(), Nearest((1,)), Nearest((10,)))]
    for name, result in zip(FLOORS, alone, strict=True):
        assert found[name] == means(result.scores)["attack"]
    assert found["linear_inverse"] < 0.1 * found["nearest_10"] < found["nearest_1"] < found["mean_image"]


def test_floors_under_noise_are_those_of_an_adversary_under_noise() -> None:
    """Noise of a thousand times the release: the linear inverse is the mean image, nearest rows are strangers."""
    run = lenet_run(Noise(scale=1e3))
    found, itself = (means(result.scores) for result in run.attack([QUICK, "linear_inverse"]))
    assert found["linear_inverse"] == itself["linear_inverse"] == itself["attack"]
    assert found["linear_inverse"] == pytest.approx(found["mean_image"], abs=1e-4)
    assert found["nearest_1"] == pytest.approx(2 * found["mean_image"], rel=0.2)
    assert found["nearest_10"] == pytest.approx(1.1 * found["mean_image"], rel=0.1)
    assert found["oracle_nearest_row"] < 0.5 * found["mean_image"], "the truth is not noised"


def test_they_move_nothing_and_can_be_left_out() -> None:
    """The other scores are the same to the bit, and so is the prediction of whatever is run after them."""
    run, attack = lenet_run(), InverseNetwork(epochs=1, queries=1)
    (without,), (beside,) = run.attack(attack, floors=False), run.attack(attack)
    assert set(beside.scores) - set(without.scores) == {*FLOORS, "oracle_nearest_row"}
    assert {who: beside.scores[who] for who in without.scores} == without.scores
    assert torch.equal(without.prediction, beside.prediction)
    assert without.under_trained == ()


def test_they_are_computed_once_for_the_same_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    run, computed = lenet_run(), list[View]()
    monkeypatch.setattr(run.evaluator.released, "floors", Floors())
    reconstruct = floors._reconstruct
    monkeypatch.setattr(
        floors, "_reconstruct", lambda view, *known: (computed.append(view), reconstruct(view, *known))[1]
    )
    first, again = run.attack([QUICK, Grey()])
    assert len(computed) == 1
    assert all(first.scores[name] == again.scores[name] for name in FLOORS)
    run.attack(QUICK, victims=run.data.victims.rows(range(10)))
    run.attack(QUICK, seed=5)
    assert len(computed) == 3, "of other victims, and of other draws, they are others"


def test_other_releases_of_the_same_victims_are_reconstructed_anew() -> None:
    """As after a further round of training: same shape, same names, same key."""
    rows = torch.randn(40, 3, generator=generator(0))
    stamp, held = Stamp("predict", 0, 0, 0), Floors()

    def predicted(factor: float) -> Tensor:
        view = View("server", (Message("client", "server", "activation", "cut", {"z": factor * rows[:9]}, stamp),), {})
        known = Knowledge((3,), auxiliary=rows, query=lambda x: {"z": 2 * x})
        return held.predict(view, known, 0, "server")["linear_inverse"]

    torch.testing.assert_close(predicted(2.0), rows[:9], rtol=0, atol=1e-3)
    assert not torch.allclose(predicted(4.0), rows[:9], atol=0.1)


def test_what_stands_beside_moves_no_draw_of_the_scorer() -> None:
    drawn, rows = [generator(3), generator(3)], torch.rand(20, 4, generator=generator(0))
    score_reconstruction(rows, rows + 1, None, rows[:5], drawn[0])
    score_reconstruction(rows, rows + 1, None, rows[:5], drawn[1], {"floor": rows + 2})
    assert torch.equal(*(one.get_state() for one in drawn))


def test_only_reconstructions_from_releases_have_them() -> None:
    assert not set(two_party().attack(Norm(), adversary="left0")[0].scores) & {*FLOORS, *ORACLES}
    (recorded,) = u_digits().attack(QUICK)
    assert {*FLOORS, *ORACLES} <= set(recorded.scores), "96 victims are enough for principal components"
    table = two_party().attack(QUICK, adversary="server0")[0].scores
    assert set(FLOORS) < set(table)
    assert "psnr" not in table["linear_inverse"]


def test_a_decoder_below_a_floor_is_under_trained() -> None:
    run = lenet_run()
    low, other, strong = run.attack([Grey(), Untrained(), InverseNetwork(epochs=1, queries=1)])
    assert low.under_trained == ("mean_image", *FLOORS)
    assert "under-trained (below mean_image, linear_inverse" in repr(low)
    assert {row["under_trained"] for row in low.rows()} == {"mean_image, linear_inverse, nearest_1, nearest_10"}
    assert other.under_trained == ()
    assert strong.under_trained == (), "it starts from a linear inverse"


def test_who_could_not_compute_a_floor_is_held_to_the_mean_image_alone() -> None:
    everything = {"mean_image": torch.zeros(1), "linear_inverse": torch.ones(1)}
    assert list(compared_floors(InverseNetwork(), everything)) == ["mean_image", "linear_inverse"]
    assert list(compared_floors(Strongest(), everything)) == ["mean_image", "linear_inverse"]
    assert list(compared_floors(Fsha(), everything)) == ["mean_image"]
    assert compared_floors(QUICK, everything) == {}


def test_a_floor_counts_where_it_is_measurably_better() -> None:
    """Ten rows of error 1; a floor must be .2 dB better, and be so for rows alike."""
    truth = torch.zeros(10, 4)
    truth[::2] = 2.0  # variance 1, so that a floor of no error is not taken for one below 1e-6
    predicted = truth + 1.0

    def above(errors: Tensor) -> tuple[str, ...]:
        return floors_above(truth, predicted, {"floor": truth + errors.sqrt()[:, None]})

    assert above(torch.full((10,), 0.9)) == ("floor",)
    assert above(torch.full((10,), 0.97)) == (), ".13 dB"
    uneven = torch.tensor([0.0] * 8 + [3.0, 5.0])
    assert float(uneven.mean()) == pytest.approx(0.8)
    assert above(uneven) == (), "two rows outweigh eight"
    assert floors_above(truth[:1], predicted[:1], {"floor": truth[:1]}) == ()
    assert floors_above(truth, truth + 1e-4, {"floor": truth}) == (), "both are exact"


def test_oracles_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows on a line but for one number: one component keeps the line, and loses what sticks out of it."""
    line = torch.arange(5.0).double()[:, None] * torch.tensor([[3.0, 4.0, 0.0]])
    kept = principal_reconstruction(line + 7, 1)
    torch.testing.assert_close(kept, line + 7)
    x = torch.tensor([[3.0, 0, 0], [-3, 0, 0], [0, 1, 0], [0, -1, 0]]).double()
    torch.testing.assert_close(principal_reconstruction(x, 1), x * torch.tensor([1.0, 0, 0]))
    monkeypatch.setattr(prediction_scores, "COMPONENTS", 1)
    truth, auxiliary = x.float(), torch.tensor([[2.0, 0, 0], [0, -2, 0]])
    found = oracle_predictions(truth, auxiliary)
    assert found["oracle_nearest_row"].tolist() == [[2, 0, 0], [0, -2, 0], [2, 0, 0], [0, -2, 0]]
    assert float((found["oracle_pca_16"] - truth).square().sum()) == pytest.approx(2)
    assert list(oracle_predictions(truth[:2], auxiliary[:0])) == []


def test_pictures_of_few_victims_have_no_principal_components() -> None:
    drawn = torch.rand(33, 1, 5, 5, generator=generator(0))
    assert list(oracle_predictions(drawn, drawn[:2])) == list(ORACLES)
    assert list(oracle_predictions(drawn[:32], drawn[:2])) == ["oracle_nearest_row"]


def test_the_report_knows_every_floor_and_oracle() -> None:
    assert list(REPORTED_FLOORS) == list(FLOORS)
    assert list(REPORTED_ORACLES) == list(ORACLES)


def test_a_remark_names_the_floors() -> None:
    floors = ("linear_inverse", "nearest_10")
    attack = AttackRecord("inverse_network", "inverse_network", "server", {}, under_trained=floors)
    assert under_training(attack) == [
        "inverse_network is under-trained: linear inverse and mean of 10 nearest reconstruct better from the same "
        "knowledge"
    ]
    other = AttackRecord("rmle", "rmle", "server", {})
    assert under_training(other) == []
    assert under_training(replace(other, floors=False)) == ["rmle stands beside no floor: they were left out"]


def test_a_study_may_leave_them_out() -> None:
    grid = checked(small(attack=[{"name": "rmle", "iterations": 2, "floors": False}, {"name": "nearest"}]))
    settings = grid.cells[0].attacks
    assert [setting.floors for setting in settings] == [False, True]
    assert [setting.table.get("floors") for setting in settings] == [False, None]


def test_from_a_study_to_report_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attack = {"name": "inverse_network", "epochs": 1, "lr": 10.0, "queries": 1}
    study = small(attack=[attack], defense=[{"name": "none"}, {"name": "noise", "scale": 1.0}])
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "oracle: nearest row" in printed
    assert "is under-trained: " in printed
    plain, home = sorted((tmp_path / "out" / "runs").iterdir(), key=lambda folder: "noise" in folder.name)
    (entry,) = json.loads((home / "result.json").read_text("utf-8"))["attacks"]
    assert "linear_inverse" in entry["under_trained"]
    # Each setting has releases of its own, and so floors of its own: the same in table, result and report.
    rows = [line for line in printed.splitlines() if "floor: linear inverse" in line]
    entries = [json.loads((f / "result.json").read_text("utf-8"))["attacks"][0] for f in (plain, home)]
    floors = [[entry["scores"][m]["linear_inverse"]["mean"] for m in ("psnr", "ssim")] for entry in entries]
    assert floors[0] != floors[1]
    assert [row.split(maxsplit=3)[3].split(" / ") for row in rows] == [[f"{v:#.3g}" for v in pair] for pair in floors]
    told = [s["attacks"][entry["label"]]["scores"] for s in summarise(tmp_path / "out")["settings"]]
    assert [[scores[m]["linear_inverse"]["mean"] for m in ("psnr", "ssim")] for scores in told] == floors
    told = [json.loads((f / "result.json").read_text("utf-8"))["information"] for f in (plain, home)]
    assert told[0]["least_mse"] is None
    assert told[0]["why"].startswith("no noise is added on ")
    # Of eight victims the best floor may be below what holds on average over all rows.
    assert 0 < told[1]["least_mse"] < entry["scores"]["mse"]["attack"]["mean"]
    assert told[1]["empty"], "some pixels are always black"
    assert 0 <= told[1]["mutual_lower"] <= told[1]["mutual_upper"]
    assert 0 < told[1]["cka"] < told[0]["cka"] < 1
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert '<section id="information">' in page
    assert f"{told[1]['least_mse']:.4g}" in page
    assert "The bound by dFIL alone is empty here" in page
    assert "under-trained</span>" in page
    assert ">linear inverse " in page
    assert "Under-trained, in the settings marked so: inverse_network" in page
    assert main(["attack", str(home), "--attack", "linear_inverse"]) == 0
    assert "under-trained" not in capsys.readouterr().out
