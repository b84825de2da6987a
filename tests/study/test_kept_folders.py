"""Folders written by earlier versions open: kept as they were written, with the names of that time."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from splitfed.cli import main
from splitfed.training.checkpoint import load

KEPT = sorted((Path(__file__).parent / "kept").glob("*.zip"))


@pytest.fixture(params=KEPT, ids=lambda path: path.stem)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path / "kept")
    return tmp_path / "kept"


def test_there_is_one_of_every_version() -> None:
    assert [path.stem for path in KEPT] == ["folder_0.1.0"]


def test_a_kept_run_is_attacked_and_predicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run that is built now must be the one that was trained then: names of modules and classes moved since."""
    (run,) = (folder / "runs").iterdir()
    assert main(["attack", str(run), "--attack", "norm", "--json"]) == 2, "no labels are guessed here"
    assert "it has none to guess" in capsys.readouterr().err
    assert main(["attack", str(run), "--attack", "inverse_network", "--preset", "fast", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["scores"]["psnr"]["guess"]["mean"] > 0
    assert load(run / "checkpoints") is not None


def test_a_kept_study_is_reported_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    assert "dp_sgd" in (folder / "report.html").read_text("utf-8")
    assert main(["run", str(folder / "study.toml"), "--folder", str(folder), "--resume"]) == 0
    assert "dp_sgd" in capsys.readouterr().out
