"""Folders written by earlier versions open: kept as they were written, with the names of that time."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from splitfed.attacks.reconstruction.strongest import Strongest
from splitfed.cli import main
from splitfed.study.run.runner import read_result
from splitfed.training.checkpoint import load

# What is warned of are the names of that time.
pytestmark = pytest.mark.filterwarnings("ignore:.*the old name will be gone:DeprecationWarning")

HOME = Path(__file__).parent / "kept"
KEPT = sorted(HOME.glob("folder_?.?.?.zip"))


def unpacked(path: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "kept")
    return tmp_path / "kept"


@pytest.fixture(params=KEPT, ids=lambda path: path.stem)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(request.param, tmp_path)


def test_there_is_one_of_every_version() -> None:
    assert [path.stem for path in KEPT] == ["folder_0.1.0"]


def test_a_kept_run_is_attacked_and_predicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run that is built now must be the one that was trained then: names of modules and classes moved since."""
    (run,) = (folder / "runs").iterdir()
    assert main(["attack", str(run), "--attack", "norm", "--json"]) == 2, "no labels are guessed here"
    assert "it has none to predict" in capsys.readouterr().err
    assert main(["attack", str(run), "--attack", "inverse_network", "--budget", "fast", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["scores"]["psnr"]["attack"]["mean"] > 0
    assert load(run / "checkpoints") is not None


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["black_box", "white_box"])
def test_a_threat_model_is_asked_for(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**Strongest.budgets["quick"], "passes": 4000, "widths": (2,), "queries": 1}
    monkeypatch.setattr(Strongest, "budgets", {**Strongest.budgets, "quick": small})
    (run,) = (folder / "runs").iterdir()
    asked = ["--attack", "strongest", "--budget", "quick", "--threat-model", model, "--json"]
    assert main(["attack", str(run), *asked]) == 0
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["threat_model"] == model


def test_a_threat_model_is_refused_where_an_attack_has_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = (folder / "runs").iterdir()
    asked = ["attack", str(run), "--attack", "inverse_network", "--threat-model"]
    assert main([*asked, "white_box"]) == 2
    assert "inverse_network.threat_model: unknown key 'threat_model'" in capsys.readouterr().err
    assert main([*asked, "grey_box"]) == 2
    assert "invalid choice: 'grey_box'" in capsys.readouterr().err


def test_a_kept_study_is_reported_and_not_continued_with_another_attack(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `inverse_network` drew defenses five times, today's draws them every epoch: their figures are not mixed."""
    assert main(["report", str(folder)]) == 0
    assert "dp_sgd" in (folder / "report.html").read_text("utf-8")
    assert main(["run", str(folder / "study.toml"), "--folder", str(folder), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "holds another study: its attack[0].synthetic is None, not 0; give another folder" in said


def test_a_kept_study_of_training_attacks_is_resumed_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs say `intruders`, `ask` and `asked`; its table has a column `intruder`."""
    folder = unpacked(HOME / "folder_0.1.0_inside.zip", tmp_path)
    hijacked, honest = sorted((folder / "runs").iterdir())
    for run, party in ((hijacked, "fsha(budget=fast, width=4)"), (honest, None)):
        assert main(["attack", str(run), "--attack", "inverse_network", "--budget", "fast", "--json"]) == 0
        found = read_result(run)
        assert found is not None
        assert found["training_attack"] == party
        (entry,) = found["history"]
        assert entry["training_attacks"]["server"]
        assert entry["training_attack_scores"]["server"]["mse"]["attack"] > 0
    assert main(["report", str(folder)]) == 0
    assert "inside" in (folder / "report.html").read_text("utf-8")
    assert main(["run", str(folder / "study.toml"), "--folder", str(folder), "--resume"]) == 0
    assert "training_attack" in (folder / "results.csv").read_text("utf-8").splitlines()[0].split(",")


def test_a_kept_study_of_a_schedule_with_its_old_name_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpacked(HOME / "folder_0.1.0_alone.zip", tmp_path)
    apart, _ = sorted((folder / "runs").iterdir())
    (apart / "result.json").unlink()
    assert main(["run", str(folder / "study.toml"), "--folder", str(folder), "--resume"]) == 0
    assert "apart" in capsys.readouterr().out
    found = read_result(apart)
    assert found is not None
    assert found["schedule"] == "apart"
