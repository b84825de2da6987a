"""Every writer of a run waits for the one before, and a folder that goes away while it is written to is one line."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import splitfed as sf
from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import FolderGone
from splitfed.models.mlp import mlp
from splitfed.study.run import runner
from splitfed.study.run.longer import continue_run
from splitfed.study.run.progress import Lines
from splitfed.study.run.reattack import attack_run
from splitfed.study.run.store import hold_run
from splitfed.topologies import vanilla
from tests.examples import toy_data
from tests.study.examples import small, write
from tests.thinning import thin

LEAST: dict[str, Any] = {"training": {"rounds": 2, "batch_size": 128}, "defense": None, "attack": None}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    assert main(["run", str(write(tmp_path, small(**LEAST))), "--folder", str(tmp_path / "out"), "--json"]) == 0
    (found,) = (tmp_path / "out" / "runs").iterdir()
    return found


@pytest.mark.parametrize("moved", thin([False, True], 2), ids=["in its study", "moved out"])
def test_an_attack_waits_for_who_writes_to_the_run_and_keeps_what_was_added(
    run: Path, tmp_path: Path, moved: bool
) -> None:
    """Two attacks at once: the second had read the result before the first one had written its scores into it."""
    if moved:
        run = Path(shutil.move(run, tmp_path / run.name))
    path = run / "result.json"
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.extend(attack_run(run, ["rmle"], "quick", None)))
    with hold_run(run):
        other.start()
        other.join(0.5)
        assert other.is_alive(), "it waits"
        path.write_bytes(digests.json_with_digest({**digests.read(path, ""), "stopped": "by another process"}))
    other.join(60)
    assert [one.attack for one in found] == ["rmle"]
    result = digests.read(path, "")
    assert result["stopped"] == "by another process"
    assert [one["attack"] for one in result["attacks"]] == ["rmle"]


def test_a_continuation_waits_as_well(run: Path) -> None:
    other = threading.Thread(target=lambda: continue_run(run, 1))
    with hold_run(run):
        other.start()
        other.join(0.3)
        assert other.is_alive()
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    other.join(60)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_lock_is_not_written_through_a_link(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("mine")
    locks = run.parent.parent / ".locks"
    shutil.rmtree(locks)
    locks.mkdir()
    (locks / f"{run.name}.lock").symlink_to(thesis)
    for command in (["attack", str(run), "--attack", "rmle"], ["continue", str(run), "--rounds", "1"]):
        assert main(command) == 2
        assert "it holds a link that leads out of it" in capsys.readouterr().err
    assert thesis.read_text() == "mine"


@pytest.mark.parametrize("what", thin(["study", "run", "moved"], 2))
def test_a_folder_that_goes_away_is_told_in_one_line(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path, small(**LEAST)), tmp_path / "out"
    done = Lines.round

    def lose(self: Lines, number: int, total: int, epsilon: float | None = None) -> None:
        done(self, number, total)
        if number == 1:
            (run,) = (out / "runs").iterdir()
            if what == "moved":
                shutil.move(out, tmp_path / "elsewhere")
            else:
                shutil.rmtree(out if what == "study" else run)

    with monkeypatch.context() as patched:
        patched.setattr(Lines, "round", lose)
        assert main(["run", str(path), "--folder", str(out)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "is gone: it was moved or deleted while it was written to; put it back and go on with --resume" in line
    assert not list(out.rglob("result.json"))
    if what == "moved":
        shutil.move(tmp_path / "elsewhere", out)
        assert main(["run", str(path), "--folder", str(out), "--resume"]) == 0


def test_a_run_of_train_whose_folder_goes_away_ends_in_one_line(tmp_path: Path) -> None:
    class Lose(sf.Callback):
        def on_round_end(self, run: Any, metrics: Any) -> None:
            shutil.rmtree(tmp_path / "run")

    logging = sf.Logging(tmp_path / "run", callbacks=[Lose()])
    with pytest.raises(FolderGone, match=r"run' is gone: it was moved or deleted"):
        sf.train(
            vanilla(mlp((1, 8, 8), 10, (8,)), "relu1"),
            toy_data(60).clients(1, victims=4, auxiliary=8),
            rounds=2,
            logging=logging,
        )
    assert not (tmp_path / "run").exists()


def test_what_is_measured_for_a_folder_that_is_gone_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(FolderGone):
        runner.write_result(tmp_path / "gone", {})
    assert not (tmp_path / "gone").exists()
