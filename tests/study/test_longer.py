"""`splitfed continue`: a finished run with more rounds is the run that had them from the start; what follows it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import splitfed as sf
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.study.results import to_json
from splitfed.study.run import checked_study, longer, session
from splitfed.study.run.longer import continue_run
from splitfed.study.trust import CHECKED, read_checked
from tests.examples import assert_same
from tests.study.examples import small, write
from tests.thinning import thin

NAME = "vanilla-relu1--none--seed0"
ATTACK = {"name": "rmle", "budget": "quick", "iterations": 2}


def go(folder: Path, rounds: int, **changes: Any) -> Path:
    """Run the small study for so many rounds and return the folder of its results."""
    study = small(
        **{
            "defense": [{"name": "none"}],
            "attack": [ATTACK],
            "training": {"rounds": rounds, "batch_size": 64, "optimizer": {"name": "Adam", "lr": 0.01}},
            **changes,
        }
    )
    folder.mkdir()
    session.run_study(checked_study.prepare_study(write(folder, study)), folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with four rounds from the start."""
    return go(tmp_path_factory.mktemp("whole") / "study", 4)


def same_results(one: Path, other: Path) -> None:
    """Assert that two runs ended in the same bits, and were measured and attacked alike."""
    first, second = (sf.load(home / "runs" / NAME).state() for home in (one, other))
    for part in first:
        if part.startswith("party-"):
            assert_same(first[part], second[part], part)
    found = [json.loads((home / "runs" / NAME / "result.json").read_text()) for home in (one, other)]
    for key in ("rounds", "bytes", "messages", "predicted", "topology"):
        assert found[0][key] == found[1][key], key
    one_result, other_result = found
    assert one_result["history"][-1]["test"] == other_result["history"][-1]["test"]
    assert [a["scores"] for a in one_result["attacks"]] == [a["scores"] for a in other_result["attacks"]]


def test_a_longer_run_is_that_of_so_many_rounds(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = go(tmp_path / "study", 2)
    home = out / "runs" / NAME
    assert main(["report", str(out)]) == 0
    assert main(["continue", str(home), "--rounds", "2"]) == 0
    assert "trained for 4 rounds, at first for 2" in capsys.readouterr().out
    same_results(whole, out)
    assert pd.read_csv(out / "results.csv")["rounds"].tolist() == [4]
    assert "4 rounds of the sequential schedule" in (out / "report.html").read_text()
    assert "trained for 4 rounds, at first for 2" in (out / "report.html").read_text()
    assert not (home / "previous.json").exists()
    # The study is whole as it is, and the run can be asked again and continued again.
    assert main(["run", str(tmp_path / "study" / "study.toml"), "--folder", str(out), "--resume"]) == 0
    assert len(sf.load(home).history) == 4
    assert main(["attack", str(home), "--attack", "rmle", "--budget", "quick"]) == 0
    assert continue_run(home, 1).rounds == 5


@pytest.mark.parametrize("how", thin(["the same command", "the study"], 2))
def test_an_interrupted_continuation_goes_on(
    how: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = go(tmp_path / "study", 2)
    home = out / "runs" / NAME

    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # At the first attack, after training and everything that is measured of it.
        patch.setattr("splitfed.study.run.runner.run_attack", stop)
        with pytest.raises(KeyboardInterrupt):
            continue_run(home, 2)
    with pytest.raises(InvalidInput, match="was being continued by 2 rounds: finish that by --rounds 2"):
        continue_run(home, 3)
    if how == "the study":
        session.run_study(checked_study.prepare_study(tmp_path / "study" / "study.toml"), out, resume=True)
    else:
        continue_run(home, 2)
    same_results(whole, out)


def test_what_was_put_aside_alone_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash before anything but the result was moved."""
    home = go(tmp_path / "study", 2) / "runs" / NAME

    def stop(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(longer.shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            continue_run(home, 2)
    assert not (home / "result.json").exists()
    assert continue_run(home, 1).rounds == 3


def test_a_continued_run_may_have_a_chosen_cut(tmp_path: Path) -> None:
    """Its label keeps saying so, or the seeds of a setting would no longer belong together."""
    out = go(tmp_path / "study", 1, topology=[{"name": "vanilla", "cut": "auto"}], attack=None)
    (home,) = (out / "runs").iterdir()
    before = json.loads((home / "result.json").read_text())
    after = continue_run(home, 1)
    assert after.rounds == 2
    assert "auto" in after.topology.label
    assert {key: to_json(after)[key] for key in ("id", "topology", "seed")} == {
        key: before[key] for key in ("id", "topology", "seed")
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"defense": [{"name": "dp_sgd", "epsilon": 50.0, "delta": 1e-3, "accountant": "rdp"}]},
        r"DpSgd was worked out for 1 rounds, and would be another one for 2",
    ),
    (
        {"callback": [{"name": "early_stopping", "patience": 1, "least": 0.9}], "training": {"rounds": 4}},
        r"the run has ended early \(validation accuracy no better than",
    ),
    (
        {
            "defense": [{"name": "gaussian_release", "noise_multiplier": 4.0}],
            "training": {"rounds": 1, "evaluate_every": 2},
        },
        r"rows were scored after round 1 because it was the last \(evaluate_every=2\)",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=["length", "ended", "scored"])
def test_what_cannot_have_more_rounds(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Refused in a line, and the run stays as it was."""
    (home,) = (go(tmp_path / "study", 1, attack=None, **changes) / "runs").iterdir()
    before = {path: path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}
    with pytest.raises(InvalidInput, match=text) as caught:
        continue_run(home, 1)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()} == before


def test_a_trial_of_a_search_stays_what_it_was(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "runs").mkdir()
    (whole / "runs" / NAME).rename(tmp_path / "runs" / NAME)
    try:
        (tmp_path / "study.toml").write_text("")
        search = 'search = {trials = 1, objectives = {utility = "maximize"}}\n'
        (tmp_path / "config.toml").write_text(search)
        from splitfed.core import digests

        (tmp_path / "config.toml").write_bytes(digests.toml_with_digest(search))
        with pytest.raises(InvalidInput, match=r"is a trial of a search.*: splitfed run .*config\.toml"):
            continue_run(tmp_path / "runs" / NAME, 1)
    finally:
        (tmp_path / "runs" / NAME).rename(whole / "runs" / NAME)


def test_a_number_of_rounds_is_a_count(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["continue", str(whole / "runs" / NAME), "--rounds", "0"]) == 2
    assert re.match(r"rounds=0 is not allowed; expected a whole number of at least 1", capsys.readouterr().err)


def test_a_pipe_in_the_place_of_what_a_check_found_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CHECKED)
    assert read_checked(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "make", "told"),
    [
        (
            "config.toml",
            lambda path: path.write_text("null\n"),
            "is damaged: it holds no digest of its content; delete",
        ),
        ("config.toml", lambda path: path.write_text("[[[[[[[[\n"), "is damaged: it holds no digest of its content"),
        ("attacks", os.mkfifo, "is no folder, in which files are to be written: move it away"),
        ("attacks", lambda path: path.write_text(""), "is no folder, in which files are to be written: move it away"),
    ],
)
def test_what_was_put_in_the_place_of_a_file_of_the_run_is_said(
    name: str, make: Callable[[Path], None], told: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / NAME
    shutil.copytree(whole / "runs" / NAME, home)
    (shutil.rmtree if (home / name).is_dir() else Path.unlink)(home / name)
    make(home / name)
    for command in (["continue", str(home), "--rounds", "1"], ["attack", str(home), "--attack", "nearest"]):
        assert main(command) == 2
        assert re.fullmatch(rf".*{name} {told}.*\n", capsys.readouterr().err)
    assert (home / "result.json").is_file()
