"""A study of token ids from a file of several arrays: run, reported, and asked for predictions of new rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.data import Feature, markov_tokens
from splitfed.study.config import build
from splitfed.study.run.input_rows import read_rows
from tests.study.examples import checked, small, write

MODEL = '''
from tests.attacks.token_examples import Encoder

def encoder(shape, outputs):
    """Return a model of two arguments, input_ids and attention_mask."""
    assert len(shape) == 2
    return Encoder(17, outputs)
'''
DATA = markov_tokens(160, length=8, shortest=4)
PARTS = {name: part.select(DATA.x).numpy() for name, part in DATA.features.items()}
TOKENS = ["input_ids", "attention_mask"]
STUDY: dict[str, Any] = small(
    data={"name": "npz", "path": "tokens.npz", "x": TOKENS, "dtype": "int64", "victims": 16, "auxiliary": 64},
    model={"name": "token_model:encoder"},
    training={"rounds": 1, "batch_size": 32},
    topology=[{"name": "vanilla", "cut": "embedding"}],
    defense=None,
    attack=[{"name": "token_decoder", "epochs": 60, "queries": 1, "width": 32}],
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A study's folder with tokens and a model of two arguments."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    finders = list(sys.meta_path)
    (tmp_path / "token_model.py").write_text(MODEL)
    np.savez(tmp_path / "tokens.npz", **PARTS, y=DATA.y.numpy())
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop("token_model", None)


@pytest.mark.drawn
def test_a_study_of_tokens(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(write(home, STUDY)), "--folder", str(home / "out"), "--json"]) == 0
    run = home / "out" / "runs" / "vanilla-embedding--none--seed0"
    (attack,) = json.loads((run / "result.json").read_text())["attacks"]
    scores = attack["scores"]["token_accuracy"]
    assert attack["target"] == "tokens"
    assert scores["attack"]["mean"] > 0.95 > 0.4 > scores["frequent_token"]["mean"]
    kept = load_file(run / attack["file"])
    assert (kept["truth"].dtype, kept["prediction"].shape) == (torch.int64, (16, 2, 8))
    dependence = json.loads((run / "result.json").read_text())["dependence"]
    assert dependence["p_value"] < 0.05

    assert main(["report", str(home / "out")]) == 0
    page = (home / "out" / "report.html").read_text()
    assert "reads tokens at 0." in page
    assert "predicts the tokens of 16 victims at token accuracy" in page
    assert "baseline: the most frequent token" in page
    capsys.readouterr()

    np.savez(home / "new.npz", **{name: values[:3] for name, values in PARTS.items()})
    np.save(home / "new.npy", DATA.x[:3].numpy())
    found = []
    for name in ("new.npz", "new.npy"):
        assert main(["predict", str(run), "--input", str(home / name), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_what_cannot_be_is_refused_before_training(home: Path) -> None:
    (wrong,) = [{**STUDY, "attack": [{"name": "rmle"}], "defense": [{"name": "adversarial"}]}]
    with pytest.raises(InvalidInput) as caught:
        checked(wrong, home)
    assert "Rmle reconstructs real numbers, and rows of tokens are whole ones, such as token ids" in str(caught.value)
    assert "adversarial trains a decoder of real numbers" in str(caught.value)
    other = {**STUDY["data"], "dtype": "int8"}
    with pytest.raises(InvalidInput, match=r"data\.dtype"):
        checked({**STUDY, "data": other}, home)


def test_the_generated_tokens_are_a_source(home: Path) -> None:
    data = {"name": "markov_tokens", "rows": 160, "length": 8, "shortest": 4, "victims": 16, "auxiliary": 64}
    (cell,) = checked({**STUDY, "data": data, "attack": []}, home).cells
    loaded = build.dataset(cell.data)
    assert torch.equal(loaded.x, DATA.x)
    assert build.topology(cell, loaded).inputs == {"input_ids": "client", "attention_mask": "client"}


def test_rows_to_predict_stay_whole(tmp_path: Path) -> None:
    great = 2**24 + 1
    np.save(tmp_path / "x.npy", np.array([[great, 1]]))
    assert read_rows(tmp_path / "x.npy", (2,), dtype="int64").tolist() == [[great, 1]]
    np.save(tmp_path / "x.npy", np.array([[0.5, 1]]))
    with pytest.raises(InvalidInput, match=r"holds 0.5 in row 0, counted from 0; dtype='int64' expects whole numbers$"):
        read_rows(tmp_path / "x.npy", (2,), dtype="int64")
    parts = {"b": Feature(torch.tensor([0, 2]), (2,)), "a": Feature(torch.tensor([1]), (1,))}
    np.savez(tmp_path / "x.npz", a=np.array([[7], [8]]), b=np.array([[1, 2], [3, 4]]))
    assert read_rows(tmp_path / "x.npz", (3,), dtype="int64", features=parts).tolist() == [[1, 7, 2], [3, 8, 4]]
    with pytest.raises(InvalidInput, match=r"has no array 'x', and b leave out some of a row$"):
        read_rows(tmp_path / "x.npz", (3,), features={"b": parts["b"]})
    np.savez(tmp_path / "x.npz", a=np.array([7, 8]), b=np.array([[1, 2], [3, 4]]))
    with pytest.raises(InvalidInput, match=r"has 'a' of shape \(2,\); expected \(2, 1\)$"):
        read_rows(tmp_path / "x.npz", (3,), features=parts)
