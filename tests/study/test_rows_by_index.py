"""Files that are read by batch, transforms and mixup in a study: what the keys become, and a line for each mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.core.rows import Draw
from splitfed.data import digits
from splitfed.data.mixup import mixup_of
from splitfed.study.config import build
from splitfed.study.trust import code_of, import_paths
from tests.study.examples import SMALL, checked, small, write

MINE = """
import torch
def jitter(row, drawn):
    return (row + 0.1 * torch.rand(row.shape, generator=drawn)).clamp(0, 1)
def halve(row):
    return row[:, :4]
number = 3
"""
SPLIT = {"victims": 8, "auxiliary": 32}
NPY = {"name": "npy", "x": "x.npy", "y": "y.npy", **SPLIT}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A study's folder with the first digits in files, and a transform."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    data, before, finders = digits().rows(range(200)), set(sys.modules), list(sys.meta_path)
    np.save(tmp_path / "x.npy", data.x.numpy())
    np.save(tmp_path / "y.npy", data.y.numpy())
    table = pd.DataFrame(data.x.flatten(1).numpy(), columns=[f"p{i}" for i in range(64)])
    table.assign(label=data.y.numpy()).to_parquet(tmp_path / "rows.parquet", row_group_size=64)
    (tmp_path / "my_rows.py").write_text(MINE)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if name.startswith("my_rows"):
            del sys.modules[name]


def with_data(**data: Any) -> dict[str, Any]:
    return small(data=data, defense=[{"name": "none"}], attack=None)


def test_files_and_keys_become_a_data_set(own: Path) -> None:
    (cell,) = checked(with_data(**NPY, transform="my_rows:jitter", mixup=0.5), own).cells
    data = build.dataset(cell.data)
    assert not data.source.resident
    assert mixup_of(data.source) == 0.5
    assert torch.equal(data.x, digits().x[:200])
    assert not torch.equal(data.source.take(torch.arange(3), Draw(0, 0)), data.x[:3])
    assert cell.config["data"]["transform"] == "my_rows:jitter"
    again = build.dataset(checked(cell.config, own).cells[0].data)
    some, draw = torch.tensor([5, 3]), Draw(1, 2)
    assert torch.equal(again.source.take(some, draw), data.source.take(some, draw))
    (flat,) = checked(with_data(name="parquet", path="rows.parquet", target="label", **SPLIT), own).cells
    assert torch.equal(build.dataset(flat.data).x, digits().x[:200].flatten(1))


def test_a_study_runs_on_files_and_its_transform_needs_trust(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = with_data(**NPY, transform="my_rows:jitter")
    study["training"]["rounds"] = 1
    assert main(["run", str(write(own, study)), "--folder", str(own / "out"), "--json"]) == 0
    (run,) = (own / "out" / "runs").iterdir()
    assert (run / "code" / "my_rows.py").read_text() == MINE
    config = json.loads(json.dumps(study))
    assert list(import_paths(config)) == ["my_rows:jitter"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    with pytest.raises(InvalidInput, match="import 'my_rows:jitter'"):
        code_of(own / "out", config, trust=False)
    capsys.readouterr()


BAD: list[tuple[dict[str, Any], str]] = [
    ({**NPY, "x": "z.npy"}, r"z\.npy is missing; expected a file"),
    ({k: v for k, v in NPY.items() if k != "y"}, r"data\.y: is missing; expected text"),
    ({**NPY, "z": "x.npy"}, r"data\.z: unknown key 'z'"),
    ({**NPY, "y": "my_rows.py"}, r"my_rows\.py is no \.npy file that can be read"),
    ({**NPY, "transform": 3}, r"data\.transform: 3 is not allowed; expected text"),
    ({**NPY, "transform": "jitter"}, r"data\.transform: 'jitter' is no import path; expected module:function"),
    ({**NPY, "transform": "my_rows:gone"}, r"data\.transform: transform 'my_rows:gone': 'my_rows' has no 'gone'"),
    ({**NPY, "transform": "my_rows:number"}, r"data\.transform: transform 'my_rows:number' is a int; expected a func"),
    ({**NPY, "transform": "os:getcwd"}, r"data\.transform: transform 'os:getcwd' is part of Python itself"),
    (
        {**NPY, "transform": "my_rows:halve"},
        r"of row 0 returned \(1, 4, 8\) of float32; expected \(1, 8, 8\)",
    ),
    ({**NPY, "transform": "my_rows:jitter", "halves": True}, r"data\.transform: is not allowed beside halves"),
    ({**NPY, "mixup": "much"}, r"data\.mixup: 'much' is not allowed; expected a number"),
    ({**NPY, "mixup": 0}, r"mixup=0 is not allowed; expected a number in \(0, inf\)"),
    ({"name": "parquet", "path": "rows.parquet", "target": "labl", **SPLIT}, "unknown column in rows.parquet: 'labl'"),
    ({"name": "parquet", "path": "rows.parquet", **SPLIT}, r"data\.target: is missing; expected text"),
]


@pytest.mark.parametrize(("table", "line"), BAD)
def test_each_mistake_has_its_line(own: Path, table: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidInput, match=line):
        checked(with_data(**table), own)


def test_a_promise_about_rows_is_refused_beside_mixup() -> None:
    study = small(data={**SMALL["data"], "mixup": 0.2}, attack=None)
    study["defense"] = [{"name": "dp_sgd", "noise_multiplier": 1.0}]
    with pytest.raises(
        InvalidInput, match="mixup makes a row part of other examples, and the guarantee of DpSgd is by row"
    ):
        checked(study)
