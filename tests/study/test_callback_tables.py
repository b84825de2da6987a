"""`[[callback]]` in studies: names and parameters checked, each run with its own, early ends told and accounted for."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import splitfed as sf
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.study.report.summary import summarise
from tests.study.examples import assert_one_mistake, checked, small, write

STOP = {"name": "early_stopping", "patience": 1, "least": 0.5}
BASE: dict[str, Any] = {"defense": [{"name": "none"}], "attack": None}
OWN = """
    from pathlib import Path

    from splitfed.training.callbacks import Callback


    class Note(Callback):
        def __init__(self, path: Path, word: str = "round") -> None:
            self.path, self.word = path, word

        def on_round_end(self, run, metrics):
            with open(self.path, "a") as file:
                file.write(f"{self.word} {metrics['round']}\\n")


    class Other:
        pass
"""


def called(*callbacks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return small(**{**BASE, "callback": list(callbacks), **changes})


WRONG: list[tuple[dict[str, Any], str]] = [
    (called({"patience": 1}), r"callback\[0\]\.name: is missing; expected text"),
    (
        called({"name": "early_stoping"}),
        r"callback\[0\]\.name: unknown callback 'early_stoping'; did you mean 'early_stopping'",
    ),
    (
        called({**STOP, "patients": 3}),
        r"callback\[0\]\.patients: unknown key 'patients'; did you mean 'patience'",
    ),
    (
        called({**STOP, "patience": 0}),
        r"callback\[0\]\.patience: patience=0 is not allowed; expected a whole number of at ",
    ),
    (called({**STOP, "patience": [1, 2]}), r"callback\[0\]\.patience: \[1, 2\] is not allowed; expected a whole num"),
    (
        called({"name": "csv", "path": "/tmp/x.csv"}),
        r"callback\[0\]\.path: '/tmp/x\.csv' is not allowed; expected a path below",
    ),
    (
        called({"name": "csv", "path": "../x.csv"}),
        r"callback\[0\]\.path: '\.\./x\.csv' is not allowed; expected a path below",
    ),
    (called({"name": "csv", "path": "metrics.jsonl"}), r"callback\[0\]\.path: .* the run keeps metrics\.jsonl there"),
    (called({"name": "tensorboard", "folder": "attacks/x"}), r"callback\[0\]\.folder: .* the run keeps attacks there"),
    (called({"name": "wandb"}), r"callback\[0\]\.project: is missing; expected text"),
    (
        called({"name": "wandb", "project": "p", "mode": "on"}),
        r"callback\[0\]: unknown mode 'on'; did you mean 'online'",
    ),
    (called({"name": "nowhere:Note"}), r"callback\[0\]\.name: callback 'nowhere:Note': cannot import 'nowhere'"),
    (
        called(STOP, data={"name": "digits", "victims": 8, "auxiliary": 32, "validation": 0.0}),
        r"callback: EarlyStopping needs validation rows, and no client has one",
    ),
    (
        called(STOP, defense=[{"name": "gaussian_release", "noise_multiplier": 4.0}]),
        r"callback: EarlyStopping ends training by the scores of validation rows, which no figure of GaussianRelease",
    ),
]


@pytest.mark.parametrize(("study", "pattern"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_mistake_is_one_line(study: dict[str, Any], pattern: str) -> None:
    assert_one_mistake(study, pattern)


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(textwrap.dedent(OWN))
    with pytest.raises(InvalidInput, match=r"callback\[0\]\.name: .*no splitfed\.training\.callbacks\.Callback"):
        checked(called({"name": "notes:Other"}), tmp_path)


def test_each_run_is_written_and_may_end_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that promises something and one that does not; both stop, and say what was planned."""
    (tmp_path / "notes.py").write_text(textwrap.dedent(OWN))
    private = {"name": "gaussian_release", "noise_multiplier": 4.0}
    study = called(
        {**STOP, "public": True},
        {"name": "csv"},
        {"name": "notes:Note", "path": "notes.txt", "word": "after"},
        defense=[{"name": "none"}, private],
        training={"rounds": 9, "batch_size": 64},
        attack=[{"name": "rmle", "budget": "quick", "iterations": 2}],
    )
    path = write(tmp_path, study)
    assert main(["plan", str(path), "--schedules", "sequential"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "counts at most what crosses: training may end before round 9: early_stopping(patience=1, least=0.5" in said
    assert "not charged: " in said
    assert "when training ends, by the scores of validation rows, said to be public" in said
    assert main(["run", str(path), "--folder", str(tmp_path / "out")]) == 0
    table = pd.read_csv(tmp_path / "out" / "results.csv")
    assert (table["rounds"] < 9).all()
    assert table["stopped"].str.contains("no better than").all()
    summary = summarise(tmp_path / "out")
    assert all(s["predicted"]["agrees"] for s in summary["settings"])
    assert [s["privacy"]["agrees"] for s in summary["settings"] if s["privacy"]] == [True]
    for home in (tmp_path / "out" / "runs").iterdir():
        result = json.loads((home / "result.json").read_text())
        rounds = pd.read_csv(home / "rounds.csv")
        assert list(rounds["round"]) == list(range(result["rounds"]))
        assert rounds["loss"].tolist() == pytest.approx([entry["loss"] for entry in result["history"]])
        notes = (home / "notes.txt").read_text()
        assert notes == "".join(f"after {i}\n" for i in range(result["rounds"]))
        # Asked again, a run is what it was, and nothing is written beside it a second time.
        before = (home / "rounds.csv").stat().st_mtime_ns
        run = sf.load(home)
        assert run.stopped == result["stopped"]
        assert (home / "rounds.csv").stat().st_mtime_ns == before
        assert (home / "notes.txt").read_text() == notes
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"training ended after {result['rounds']} of 9 rounds" in page


def test_a_folder_of_somebody_else_connects_nowhere() -> None:
    from splitfed.study.trust import _addresses, import_paths

    study = {"callback": [{"name": "csv"}, {"name": "wandb", "project": "p", "mode": "online"}, {"name": "a:B"}]}
    assert _addresses(study) == ["wandb.ai"]
    assert list(import_paths(study)) == ["a:B"]
