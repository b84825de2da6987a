"""Studies and kept runs from Python: what the commands do with files, with the same results."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import splitfed as sf
from splitfed import registry
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.models.mlp import mlp
from splitfed.study.config.schema import StudyConfig, keys_of, parse_study
from splitfed.study.config.toml import dumps
from splitfed.study.results import read_result, to_json
from splitfed.study.run import checked_study
from tests.examples import assert_refuses, assert_same
from tests.study.examples import SMALL, checked, small, write

TABLES: dict[str, Any] = {key: table for key, table in SMALL.items() if key != "study"}
PLAIN, NOISY = "vanilla-relu1--none--seed0", "vanilla-relu1--noise-0.5--seed0"

TABLES_OF_A_STUDY = [one.name for one in fields(StudyConfig)]


def timeless(found: Any) -> Any:
    """Return a result without what differs from run to run."""
    if isinstance(found, dict):
        return {key: timeless(value) for key, value in found.items() if "seconds" not in key}
    return [timeless(one) for one in found] if isinstance(found, list) else found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> sf.StudyResults:
    return sf.study("small", **TABLES).run(tmp_path_factory.mktemp("study") / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_study_from_python_is_the_one_from_toml(
    results: sf.StudyResults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = sf.study("small", seeds=(0,), **TABLES)
    grid = checked(small())
    assert study.checked.grid.resolved == grid.resolved
    assert study.runs == tuple(cell.id for cell in grid.cells)
    assert repr(study) == "PreparedStudy(small, 3 runs)"
    study.save(tmp_path / "study.toml")
    assert checked_study.prepare_study(tmp_path / "study.toml").grid.resolved == grid.resolved
    assert main(["run", str(write(tmp_path, small())), "--folder", str(tmp_path / "out"), "--json"]) == 0
    for found in results.results:
        assert timeless(to_json(found)) == timeless(to_json(read_result(tmp_path / "out" / "runs" / found.id)))
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "study.toml"), "--json", "--schedules", "blind"]) == 0
    assert json.loads(json.dumps(study.plan(["blind"]))) == json.loads(capsys.readouterr().out)


def test_short_forms_mean_the_tables() -> None:
    one = {"name": "vanilla", "cut": "relu1"}
    short = sf.study("s", data="digits", model="mlp", topology=one, defense="none", attack="rmle", seeds=range(2))
    full = sf.study(
        data={"name": "digits"},
        model={"name": "mlp"},
        topology=[one],
        defense=[{"name": "none"}],
        attack=[{"name": "rmle"}],
        study={"name": "s", "seeds": [0, 1]},
    )
    assert short.checked.grid.resolved == full.checked.grid.resolved
    assert len(short.runs) == 2


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    """As text they would be kept in the folder, which nobody could open again."""
    given = {**SMALL["training"], "optimizer": {"lr": np.float64(0.25), "momentum": torch.tensor(0.5)}}
    text = dumps(sf.study(**{**TABLES, "training": given}).checked.grid.resolved)
    assert "lr = 0.25" in text
    assert "momentum = 0.5" in text
    with pytest.raises(InvalidInput, match="<object object> is not allowed in a study; expected text, a number"):
        dumps({"data": {"name": object()}})


def test_mistakes_are_those_of_a_file() -> None:
    wrong: dict[str, Any] = {**TABLES, "data": "digit", "attack": ["rml", "inverse_network"]}
    with pytest.raises(InvalidInput) as refused:
        sf.study("small", **wrong)
    assert "study: data.name: unknown data set 'digit'; did you mean 'digits'?" in str(refused.value)
    assert "study: attack[0].name: unknown attack 'rml'; did you mean 'rmle'" in str(refused.value)
    assert_refuses(lambda: sf.study("small", **TABLES, modle={}), "unknown key 'modle'; did you mean 'model'")
    assert_refuses(lambda: sf.study("a b", **TABLES), "study.name: 'a b' is not allowed")
    assert_refuses(lambda: sf.study("small", study="x", **TABLES), "study='x' is not allowed; expected a table")
    assert_refuses(
        lambda: sf.study("small", study={"targt": 1}, **TABLES), "unknown key 'targt'; did you mean 'target'"
    )
    assert_refuses(lambda: sf.study("small", **TABLES).run("x", workers=0), "workers=0 is not allowed")


@pytest.mark.parametrize("wrong", [1, True, "x", 1.5, ["x"], [1], [[]], [{}, 1], (1,), b"x", {1: 2}], ids=repr)
def test_what_is_no_table_is_refused_in_its_place(wrong: Any) -> None:
    for key in (*TABLES_OF_A_STUDY, "schedule", "rounds", "foo"):
        if key != "study":
            with suppress(InvalidInput):  # a name alone may stand for a table
                sf.study("small", **{**TABLES, key: wrong})
        with pytest.raises(InvalidInput, match=f"study: {key}: "):
            parse_study({**SMALL, key: 1}, "study")


def test_a_key_of_a_table_that_stands_alone_is_told_where_it_belongs() -> None:
    tables: dict[str, set[str]] = {name: set(keys_of(name)) for name in TABLES_OF_A_STUDY}
    for table, keys in tables.items():
        for key in keys - {*TABLES_OF_A_STUDY, "name", "seeds", "base"}:
            for value in (1, "x", ["x"], {"name": "x"}):
                assert_refuses(lambda given={key: value}: sf.study("small", **TABLES, **given), f"{table}.{key}")
    assert_refuses(
        lambda: sf.study("small", **TABLES, seed=1), "seed: is no table of a study; expected in a table, as st"
    )
    assert_refuses(lambda: sf.study("small", **TABLES, foo="x"), "study: foo: unknown key 'foo' (allowed: attack, ")


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 300, ".", "/dev/null/x", "/proc/y", "file", "file/x"])
def test_where_a_study_cannot_be_written_is_told(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    study = sf.study("small", **TABLES)
    with pytest.raises(InvalidInput, match="folder"):
        study.run(path)
    if path != "file":
        with pytest.raises(InvalidInput, match=r"path=|is no folder, in which files are to be written"):
            study.save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_frame_is_the_table_of_the_study(results: sf.StudyResults) -> None:
    found = results.frame().set_index("run").sort_index()
    table = pd.read_csv(results.folder / "results.csv").set_index("run").sort_index()
    # A column without any value is read back as a number that is missing.
    kept = table.columns[table.notna().any()]
    pd.testing.assert_frame_equal(found[kept], table[kept], check_dtype=False)
    rounds = results.frame(rounds=True)
    assert list(rounds.groupby("run")["round"].apply(list)) == [[0, 1]] * 3
    last = rounds[rounds["round"] == 1].set_index("run")["test"]
    assert dict(last) == dict(found["utility"])
    assert set(results.runs) == set(last.index)
    assert results.failed == {}
    assert repr(results) == f"StudyResults({str(results.folder)!r}, 3 runs)"
    assert results._repr_html_().count("<tr>") == 4


def test_a_run_of_a_study_is_loaded_as_it_was_and_left_as_it_is(
    results: sf.StudyResults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(results.folder)
    run = results.load(NOISY)
    kept = read_result(results.folder / "runs" / NOISY)
    assert kept is not None
    assert (run.utility, run.bytes, run.history) == (kept.utility.test, kept.bytes, list(kept.history))
    (found,) = run.attack("inverse_network", budget="quick")
    again = sf.load(results.folder / "runs" / NOISY)
    run.continue_training(1)
    assert len(run.history) == 3
    assert contents(results.folder) == before, "nothing is written"
    longer = sf.study("small", **{**TABLES, "training": {**SMALL["training"], "rounds": 3}}).run(tmp_path / "longer")
    assert_same(run.state_dict(), longer.load(NOISY).state_dict())
    x = torch.from_numpy(np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32))
    assert torch.equal(again.predict(x, number=3), results.load(NOISY).predict(x, number=3))
    capsys.readouterr()
    command = ["attack", str(tmp_path / "longer" / "runs" / NOISY), "--attack", "inverse_network", "--budget", "quick"]
    assert main([*command, "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    (same,) = run.attack("inverse_network", budget="quick")
    assert entry["scores"]["psnr"]["attack"]["mean"] == same.scores["attack"]["psnr"].mean
    assert same.scores["attack"]["psnr"].mean != found.scores["attack"]["psnr"].mean


def test_the_model_of_a_study_is_exported(results: sf.StudyResults) -> None:
    run = results.load(PLAIN)
    x = run.data.clients[0].test.x
    with torch.no_grad():
        assert torch.equal(run.export(mlp((1, 8, 8), 10, hidden=[12], seed=9)).eval()(x), run.predict(x))


def test_a_loaded_run_is_tuned_and_audited(tmp_path: Path) -> None:
    private = {"name": "gaussian_release", "clip": 1.0, "noise_multiplier": 2.0}
    tables = {**TABLES, "training": {"rounds": 1}, "defense": [private], "attack": []}
    (name,) = (study := sf.study("private", **tables).run(tmp_path / "out")).runs
    run = study.load(name)
    found = sf.audit(run, trials=400)
    assert found["held"]
    assert found["mechanisms"]
    tuned = run.tune(registry.load("attacks", "rmle")(iterations=3), {"iterations": [1, 2]}, trials=2)
    assert {trial.parameters["iterations"] for trial in tuned.trials} == {1, 2}


def test_what_is_no_study_and_no_run_is_refused(results: sf.StudyResults, tmp_path: Path) -> None:
    assert_refuses(lambda: results.load("x"), f"unknown run 'x' (allowed: {NOISY},")
    assert_refuses(lambda: sf.load_study(tmp_path), "holds no study; expected a folder that `splitfed run` has written")
    assert_refuses(lambda: sf.load(results.folder), "holds a study; give the folder of one of its runs")
    assert_refuses(
        lambda: sf.load(results.folder / "runs" / PLAIN, rounds=3), "is a run of a study, which says all by itself"
    )


def test_a_call_finds_the_study_however_it_was_imported() -> None:
    import splitfed.study.config

    assert splitfed.study is sf.study
    assert sf.study("small", **TABLES).name == "small"


def test_a_study_from_python_computes_on_one_thread_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tables = {key: one for key, one in small(attack=[], defense=[{"name": "none"}]).items() if key != "study"}
        sf.study("threads", **tables).run(tmp_path / "out")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    (told,) = (tmp_path / "out" / "runs").glob("*/environment.json")
    assert json.loads(told.read_text("utf-8"))["threads"] == 1
