"""Writers hold what the run measured, once a round, also after a crash; with the real packages where they are there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.models.mlp import mlp
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.examples import assert_refuses, toy_data


class Crash(sf.Callback):
    """Stands for a crash after round 1 was written and before its checkpoint."""

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if metrics["round"] == 1:
            raise KeyboardInterrupt


def go(*callbacks: sf.Callback, folder: Path | None = None, resume: bool = False) -> Run:
    logging = sf.Logging(folder, resume, callbacks=callbacks)
    topology = vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=0), "relu1")
    data = toy_data(80).clients(2, auxiliary=16, victims=4)
    return sf.train(topology, data, rounds=3, batch_size=20, evaluation=sf.Evaluation(every=2), logging=logging)


def interrupted(folder: Path, writer: Any) -> Run:
    """Return the run that was stopped within its second round and resumed, with a new writer each time."""
    with pytest.raises(KeyboardInterrupt):
        go(writer(), Crash(), folder=folder)
    return go(writer(), folder=folder, resume=True)


def test_the_csv_file_is_the_frame_of_the_run(tmp_path: Path) -> None:
    """Round 0 is not scored, so that later rounds have more columns; every round stands there once."""
    path = tmp_path / "log" / "run.csv"
    run = interrupted(tmp_path / "run", lambda: sf.CsvWriter(path))
    found, frame = pd.read_csv(path), run.to_frame()
    assert list(found["round"]) == [0, 1, 2]
    pd.testing.assert_frame_equal(found, frame, check_dtype=False)
    assert_refuses(lambda: go(sf.CsvWriter(tmp_path)), "is a folder; CsvWriter needs a file")


def test_the_csv_file_is_complete_after_every_round(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    with pytest.raises(KeyboardInterrupt):
        go(sf.CsvWriter(path), Crash())
    assert list(pd.read_csv(path)["round"]) == [0, 1]


@pytest.mark.parametrize("writer", [lambda: sf.TensorBoardWriter("x"), lambda: sf.WandbWriter("x")])
def test_a_package_that_is_missing_is_said_before_anything_is_trained(
    writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = type(writer()).__name__.removesuffix("Writer").lower()
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInput, match=rf"the package {extra} cannot be imported .*: install splitfed\[{extra}\]"):
        go(writer(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Events:
    """Stands for the event writer of TensorBoard, which `test_tensorboard_reads...` runs for real."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.opened, self.scalars = (folder, purge_step), {}  # type: ignore[var-annotated]

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert isinstance(value, float)
        self.scalars.setdefault(name, []).append((step, value))

    def flush(self) -> None:
        """Nothing is held back."""


def test_what_tensorboard_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Events] = []
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda *a, **k: opened.append(Events(*a, **k)) or opened[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    run = interrupted(tmp_path / "run", lambda: sf.TensorBoardWriter(tmp_path / "events"))
    (result,) = run.attack("rmle", budget="quick")
    first, second = opened
    assert [one.opened for one in opened] == [(str(tmp_path / "events"), 0), (str(tmp_path / "events"), 1)]
    assert second.scalars["loss"] == [(1, run.history[1]["loss"]), (2, run.history[2]["loss"])]
    assert second.scalars["test"] == [(n, run.history[n]["test"]["union"]) for n in (1, 2)]
    assert "round" not in second.scalars
    assert second.scalars["attack_rmle/psnr_attack"] == [(2, result.scores["attack"]["psnr"].mean)]
    assert [step for step, _ in first.scalars["loss"]] == [0, 1]


def test_what_wandb_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def init(**given: Any) -> Any:
        lines: dict[int, Any] = {}
        log = lambda row, step, commit: commit and lines.setdefault(step, row)  # noqa: E731
        begun.append(
            SimpleNamespace(given=given, id=given["id"] or "abc", lines=lines, log=log, summary={}, finish=lambda: None)
        )
        return begun[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    run = interrupted(tmp_path / "run", lambda: sf.WandbWriter("project", folder=tmp_path))
    (result,) = run.attack("rmle", budget="quick")
    first, second = begun
    assert (first.given["id"], second.given["id"], second.given["resume"]) == (None, "abc", "allow"), (
        "the same run there"
    )
    assert first.given["mode"] == "offline"
    assert first.given["config"]["schedule"] == "sequential"
    assert {step: row["loss"] for step, row in second.lines.items()} == {n: run.history[n]["loss"] for n in (1, 2)}
    assert second.summary["attack_rmle/psnr_attack"] == result.scores["attack"]["psnr"].mean
    assert_refuses(lambda: sf.WandbWriter("x", mode="offlin"), "unknown mode 'offlin'; did you mean 'offline'")


def test_tensorboard_reads_what_the_run_measured(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra splitfed[tensorboard] is not installed")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    run = interrupted(tmp_path / "run", lambda: sf.TensorBoardWriter(tmp_path / "events"))
    found = events.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == {entry["round"]: pytest.approx(entry["loss"], rel=2**-20) for entry in run.history}
    assert len(found.Scalars("loss")) == 3, "the round that was cut short is there once"


def test_wandb_keeps_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra splitfed[wandb] is not installed")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    writer = sf.WandbWriter("project", folder=tmp_path)
    run = go(writer)
    assert writer._run.summary["loss"] == run.history[-1]["loss"]
    writer.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_progress_is_a_line_a_round_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run = go(sf.ProgressBar())
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert f"loss {run.history[0]['loss']:.4g}, " in lines[0]
    assert f"validation accuracy {run.history[2]['validation']['union']:.4g}" in lines[2]
    assert lines[2].endswith("0 s left")
    run.continue_training(1)
    assert capsys.readouterr().err.startswith("round 4 of 4: ")
