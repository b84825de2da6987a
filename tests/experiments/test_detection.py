"""The table of detectors: hijacked and honest trainings apart, alarms, and what was recovered until one and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.board import detection
from experiments.board.detection import complete_detections, describe_detections, read_detection, read_detections
from experiments.board.studies import BOARD, read_studies
from splitfed.core.errors import InvalidInput
from splitfed.study.config.toml import dumps
from tests.study.examples import small

WATCHED: dict[str, Any] = {
    "study": {"name": "watched", "seeds": [0]},
    "training": {"rounds": 2, "batch_size": 256, "evaluate_every": 2},
    "topology": [{"name": "vanilla", "cut": "relu1"}],
    "defense": [{"name": "none"}],
    "attack": [{"name": "fsha", "every": 1, "width": 4}],
}
SPLITGUARD = {"name": "splitguard", "start": 1, "rate": 0.5, "window": 1, "threshold": 1.0}


def written(folder: Path, **changes: Any) -> Path:
    tables = {"detector": [SPLITGUARD], **small(**WATCHED), **changes}
    (folder / "watched.toml").write_text(dumps(tables), "utf-8")
    return folder / "watched.toml"


def cells(text: str, *names: str) -> list[str]:
    line = next(line for line in text.splitlines() if all(name in line for name in names))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_what_is_missing_is_trained_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = read_detection(written(tmp_path))
    assert [run.server for run in study.runs] == ["honest", "fsha(budget=quick, width=4)"]
    assert " 0/1 |" in describe_detections([study], tmp_path)
    complete_detections([study], tmp_path, lambda line: None)
    honest, hijacked = (json.loads(line) for line in (tmp_path / "watched.jsonl").read_text("utf-8").splitlines())
    assert (honest["metric"], honest["curve"]) == (None, [])
    assert (hijacked["metric"], len(hijacked["curve"])) == ("psnr", 2)
    monkeypatch.setattr(detection, "_watch", None)
    complete_detections([study], tmp_path, lambda line: None)
    changed = read_detection(written(tmp_path, detector=[{**SPLITGUARD, "window": 2}]))
    assert not {run.key for run in changed.runs} & {run.key for run in study.runs}


def test_alarms_are_counted_by_server_and_what_was_recovered_ends_with_them(tmp_path: Path) -> None:
    """At the round of the alarm, not at the end; an alarm at an honest server is that of the honest row alone."""
    study = read_detection(written(tmp_path, study={"name": "watched", "seeds": [0, 1]}))
    lines = []
    for run in study.runs:
        about = {"key": run.key, "detector": run.detector.label, "server": run.server, "utility": 0.9}
        hijacked = run.server != "honest"
        alarm = {"step": 5, "round": 1} if hijacked and run.cell.seed == 0 else {"step": None, "round": None}
        curve = {"metric": "psnr", "curve": [10.0, 20.0], "floor": 8.0}
        lines.append(json.dumps({**about, **alarm, **(curve if hijacked else {"metric": None, "curve": []})}))
    (tmp_path / "watched.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    page = describe_detections([study], tmp_path)
    found = cells(page, "`fsha(")
    assert found[2:5] == ["1 of 2", "5", "1"]
    assert [cell.partition(" ")[0] for cell in found[5:8]] == ["15.0", "20.0", "8.0"]
    assert not found[6].endswith("tells")
    worse = (tmp_path / "watched.jsonl").read_text("utf-8").replace('"floor": 8.0', '"floor": 21.0')
    (tmp_path / "watched.jsonl").write_text(worse, "utf-8")
    assert cells(describe_detections([study], tmp_path), "`fsha(")[6].endswith(": less than the mean image tells")
    assert cells(page, "| honest |")[2:8] == ["0 of 2", "-", "-", "-", "-", "-"]


def test_the_board_reads_studies_of_detectors_as_such() -> None:
    detections = {study.name for study in read_detections(BOARD)}
    assert detections == {"detection"}
    assert not detections & {study.name for study in read_studies(BOARD)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"detector": [{"name": "splitgard"}]}, r"detector\[0\]\.name: unknown"),
        ({"detector": [{**SPLITGUARD, "rate": 2.0}]}, "rate=2.0 is not allowed"),
        ({"attack": [{"name": "linear_inverse"}]}, "no attack of it is in a training"),
    ],
)
def test_a_study_of_no_detector_or_no_hijacker_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        read_detection(written(tmp_path, **changes))
