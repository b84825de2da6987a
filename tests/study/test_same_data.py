"""The data of a study are part of what it is: runs on other data are neither added to it nor averaged with its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset, LabelSet
from splitfed.study.report.data import check_same_data
from splitfed.study.results import RunResult
from splitfed.training.identity import data_digest
from tests.study.examples import small, write


def write_rows(folder: Path, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    x, y = drawn.random((80, 1, 8, 8), dtype=np.float32), np.arange(80) % 4
    np.savez(folder / "rows.npz", x=x, y=y)


def study() -> dict[str, Any]:
    return small(
        study={"name": "own", "seeds": [0, 1]},
        data={"name": "npz", "path": "rows.npz", "victims": 4, "auxiliary": 8},
        training={"rounds": 1, "batch_size": 32},
        defense=None,
        attack=[],
    )


def message(path: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    assert main(["run", str(path), "--folder", str(out), "--resume", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_study_does_not_go_on_with_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is missing and the file has changed: its rows would be averaged with those of another data set."""
    write_rows(tmp_path, 1)
    path, out = write(tmp_path, study()), tmp_path / "out"
    assert main(["run", str(path), "--folder", str(out)]) == 0
    first, second = sorted((out / "runs").iterdir())
    shutil.rmtree(second)
    write_rows(tmp_path, 2)
    assert "holds this study on other data: what it reads has changed since" in message(path, out, capsys)
    # The digests of results hold the line where data.json is gone.
    (out / "data.json").unlink()
    assert "holds this study on other data" in message(path, out, capsys)
    assert not second.exists()
    write_rows(tmp_path, 1)
    assert main(["run", str(path), "--folder", str(out), "--resume"]) == 0
    results = [json.loads((run / "result.json").read_text()) for run in (first, second)]
    assert results[0]["data_digest"] == results[1]["data_digest"], "whatever the split"
    # As a copied folder, or an earlier version, may have left it.
    forged = {key: one for key, one in results[1].items() if key != "digest"} | {"data_digest": "another"}
    (second / "result.json").write_bytes(digests.json_with_digest(forged))
    capsys.readouterr()
    assert main(["report", str(out)]) == 2
    assert "were trained on different data (their digests differ), and are not averaged" in capsys.readouterr().err
    # Nor is the result of one run taken for that of another.
    shutil.copy(first / "result.json", second / "result.json")
    said = f"{second / 'result.json'} is damaged: it is the result of another run, {first.name!r}"
    assert said in message(path, out, capsys)
    assert main(["report", str(out)]) == 2
    assert said in capsys.readouterr().err


def test_runs_of_an_earlier_version_say_nothing_of_their_data() -> None:
    check_same_data([RunResult("a"), RunResult("b", data_digest="1"), RunResult("c", data_digest="1")])
    with pytest.raises(InvalidInput, match="runs 'b' and 'c' were trained on different data"):
        check_same_data([RunResult("a"), RunResult("b", data_digest="1"), RunResult("c", data_digest="2")])


def test_the_digest_is_that_of_all_that_is_learnt_from() -> None:
    x, y, task = torch.arange(12.0).reshape(6, 2), torch.arange(6) % 2, classification(2)
    one = Dataset("a", x, y, task)
    changed = x.clone()
    changed[5, 1] += 1e-6
    others = [
        Dataset("a", changed, y, task),
        Dataset("a", x, 1 - y, task),
        Dataset("a", x.flip(0), y, task),
        Dataset("a", x, y, task, groups=torch.arange(6)),
        Dataset("a", x, y, task, targets={"t": LabelSet(y, task)}),
    ]
    assert data_digest(Dataset("another name", x.clone(), y, task)) == data_digest(one)
    assert len({data_digest(found) for found in [one, *others]}) == 6
