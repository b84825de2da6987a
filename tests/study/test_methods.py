"""Federated methods in studies: checked as a whole, a grid of their own, planned, resumed, asked again, reported."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn

from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.federated import FML
from splitfed.registry import TABLES
from splitfed.study.config import build
from splitfed.study.config.toml import dumps
from splitfed.study.run import checked_study
from splitfed.study.run.progress import Lines
from splitfed.study.run.runner import run_cell
from tests.study.examples import assert_one_mistake, checked, small, write
from tests.thinning import thin

DATA: dict[str, Any] = {"name": "digits", "victims": 8, "auxiliary": 32, "clients": 3, "dirichlet": 0.5}
WHOLE: dict[str, Any] = {
    "study": {"name": "methods", "seeds": [0, 1]},
    "data": DATA,
    "training": {"rounds": 3, "batch_size": 64, "schedule": "independent"},
    "topology": [{"name": "local", "cuts": ["relu1"]}],
    "method": [{"name": "none"}, {"name": "fedproto", "weight": 0.5}],
    "defense": [{"name": "none"}],
    "attack": None,
}
SPLIT: dict[str, Any] = {
    "data": DATA,
    "training": {"rounds": 2, "batch_size": 64, "schedule": {"name": "sequential", "hand_over": "none"}},
    "method": [{"name": "fedproto"}],
    "defense": [{"name": "none"}],
}


def whole(**changes: Any) -> dict[str, Any]:
    return small(**{**WHOLE, **changes})


WRONG: list[tuple[dict[str, Any], str]] = [
    (whole(method=[]), r"method: \[\] is not allowed; expected "),
    (whole(method=[{"weight": 1.0}]), r"method\[0\]\.name: is missing; expected text"),
    (whole(method=[{"name": "fedprot"}]), r"method\[0\]\.name: unknown method 'fedprot'; did you mean 'fedproto'"),
    (whole(method=[{"name": "nome"}]), r"method\[0\]\.name: unknown method 'nome'; did you mean 'none'"),
    (whole(method=[{"name": "none", "weight": 1.0}]), r"method\[0\]\.weight: unknown key 'weight'"),
    (
        whole(method=[{"name": "fedproto", "weigth": 1.0}]),
        r"method\[0\]\.weigth: unknown key 'weigth'; did you mean 'weight'",
    ),
    (
        whole(method=[{"name": "fedproto", "weight": "much"}]),
        r"method\[0\]\.weight: 'much' is not allowed; expected a number, or a list of those",
    ),
    (
        whole(method=[{"name": "none"}, {"name": "fedproto", "weight": [1.0, -1.0]}]),
        r"method\[1\]\.weight: fedproto weight=-1\.0 is not allowed; expected a number",
    ),
    (
        whole(method=[{"name": "fedproto", "distance": "l1"}]),
        r"method\[0\]\.distance: unknown fedproto distance 'l1'; did you mean 'l2'",
    ),
    (whole(method=[{"name": "none"}, {"name": "none"}]), r"method: none is there 2 times; expected once"),
    (
        whole(method=[{"name": "fml", "meme": {"model": "mpl"}}]),
        r"method\[0\]\.meme\.model: unknown model 'mpl'; did you mean 'mlp'",
    ),
    (whole(method=[{"name": "fml", "meme": 3}]), r"method\[0\]\.meme: 3 is not allowed; expected a table \{model = "),
    (
        whole(method=[{"name": "fml", "private": {"model": "mlp"}}]),
        r"method\[0\]: fml takes no private= on whole models: the topology's own model is that one",
    ),
    (
        whole(method=[{"name": "fedkd", "mentee": {"name": "local"}}]),
        r"method\[0\]\.mentee: cannot be written in a study; fedkd takes it from Python alone",
    ),
    (whole(method=[{"name": "mafml"}]), r"method\[0\]: mafml .*public"),
    (
        whole(topology=[{"name": "local"}]),
        r"method\[1\]: topology 'local' has no embedding for fedproto",
    ),
    (
        whole(training={**WHOLE["training"], "schedule": {"name": "independent", "steps": 0}}),
        r"training\.schedule\.steps: steps=0 is not allowed; expected a whole number of at least 1",
    ),
    (
        whole(training={"rounds": 1, "schedule": {"name": "splitfed_v1", "secure": True}}, data={**DATA, "clients": 6}),
        r"method\[1\]: secure hides the weights that clients upload, not the other messages of method FedProto",
    ),
    (
        whole(training={**WHOLE["training"], "record": {"parties": ["fed_serve"]}}, method=[{"name": "fedproto"}]),
        r"training\.record\.parties: unknown party to record 'fed_serve'; did you mean 'fed_server'",
    ),
]


@pytest.mark.parametrize(("study", "pattern"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_mistake_is_one_line(study: dict[str, Any], pattern: str) -> None:
    assert_one_mistake(study, pattern)


def test_methods_are_an_axis_of_the_grid() -> None:
    study = whole(
        method=[{"name": "none"}, {"name": "fedproto", "weight": [0.5, 1.0], "distance": "l2"}],
        training={**WHOLE["training"], "schedule": {"name": "independent", "steps": [2, 4]}},
        study={"name": "grid", "seeds": [0]},
    )
    cells = checked(study).cells
    layers = ("none", "fedproto-0.5-l2", "fedproto-1-l2")
    assert [cell.id for cell in cells] == [
        f"local-relu1--independent-{steps}--{layer}--none--seed0" for steps in (2, 4) for layer in layers
    ]
    assert cells[1].method.label == "fedproto(weight=0.5, distance=l2)"
    assert cells[0].method.label == "none"
    assert checked(small()).cells[0].method.parts == ()


@pytest.mark.parametrize("name", thin(TABLES["methods"], 6))
def test_every_method_runs_from_a_study_as_planned(name: str, tmp_path: Path) -> None:
    """On whole models, with what methods may ask for: a border in the model, rows to show, several classes a client."""
    rows = {**DATA, "dirichlet": None, "public": 0.1}
    study = whole(data={key: value for key, value in rows.items() if value is not None}, method=[{"name": name}])
    study |= {
        "study": {"name": "one", "seeds": [0]},
        "training": {"rounds": 2, "batch_size": 64, "schedule": "independent"},
    }
    grid, data = checked_study.check_study(study, "study.toml", tmp_path)
    found = run_cell(grid.cells[0], data, tmp_path / "run", Lines(1))
    assert found.failed is None
    assert (found.utility.spread or {})["min"] > 0
    planned = found.predicted
    if planned["at_most"] is None:
        assert found.bytes_by_kind == planned["bytes_by_kind"]
        assert found.messages == planned["messages"]
    else:
        assert all(n <= planned["bytes_by_kind"][kind] for kind, n in found.bytes_by_kind.items())
    assert (found.turned_off is not None) == (name == "standalone")


def test_a_model_of_the_methods_own_is_a_table(tmp_path: Path) -> None:
    memes = [{"model": "mlp", "hidden": [4]}, {"model": "mlp", "hidden": [5]}]
    study = whole(method=[{"name": "fml", "meme": memes}], study={"name": "memes", "seeds": [3]})
    grid, data = checked_study.check_study(study, "study.toml", tmp_path)
    one, other = grid.cells
    assert [cell.method.label for cell in grid.cells] == [f"fml(alpha=0.5, meme=mlp(hidden={n}))" for n in (4, 5)]
    method = build.method(one, data)
    assert isinstance(method, FML)
    assert [layer.out_features for layer in method.meme.modules() if isinstance(layer, nn.Linear)] == [4, 10]  # type: ignore[union-attr]
    found = run_cell(one, data, tmp_path / "run", Lines(1))
    # Its weights go down and up: 64 x 4 + 4 and 4 x 10 + 10 floats, for three clients in three rounds.
    assert found.bytes_by_kind == {"weights": 2 * 3 * 3 * 4 * (64 * 4 + 4 + 4 * 10 + 10)}
    again = run_cell(
        checked_study.check_study(one.config, "config.toml", tmp_path)[0].cells[0], data, tmp_path / "again", Lines(1)
    )
    assert again.utility == found.utility
    assert other.id != one.id


def test_the_config_of_a_run_means_that_run_alone() -> None:
    for cell in checked(whole()).cells:
        (again,) = checked(tomllib.loads(dumps(cell.config))).cells
        for name in ("seed", "data", "model", "training", "method"):
            assert getattr(again, name) == getattr(cell, name)
    assert "method" not in checked(small()).resolved


def test_a_fed_server_that_only_a_method_brings_can_be_recorded() -> None:
    checked(whole(training={**WHOLE["training"], "record": {"parties": ["fed_server"]}}, method=[{"name": "fedproto"}]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds, on whole models."""
    home = tmp_path_factory.mktemp("methods")
    assert main(["run", str(write(home, whole())), "--folder", str(home / "out")]) == 0
    return home / "out"


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {p.parent.name: json.loads(p.read_text("utf-8")) for p in (folder / "runs").glob("*/result.json")}


def test_a_run_has_what_was_planned_and_what_its_method_scored(finished: Path) -> None:
    found = results(finished)
    assert {one["method"] for one in found.values()} == {"none", "fedproto(weight=0.5)"}
    for one in found.values():
        assert one["bytes_by_kind"] == one["predicted"]["bytes_by_kind"]
        assert one["messages"] == one["predicted"]["messages"]
        assert ("prototype" in one["bytes_by_kind"]) == (one["method"] != "none")


def test_the_plan_tells_a_method_beside_its_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, whole())
    assert main(["plan", str(path), "--schedules", "splitfed_v1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["topologies"][0]["schedules"]
    assert [(row["schedule"], row["method"], row["in_study"]) for row in rows] == [
        ("independent", "none", True),
        ("independent", "fedproto(weight=0.5)", True),
        ("splitfed_v1", "none", False),
    ]
    assert [sorted(row["bytes_by_kind"]) for row in rows] == [[], ["prototype"], ["weights"]]
    assert main(["plan", str(path), "--schedules", "independent"]) == 0
    assert "independent + fedproto(weight=0.5) *" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_run_with_a_method_is_rebuilt_attacked_and_asked_to_predict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = small(**SPLIT, attack=None)
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 0
    (home,) = (tmp_path / "out" / "runs").iterdir()
    before = (home / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["attack", str(home), "--attack", "membership_threshold", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert 0.0 <= entry["scores"]["auc"]["attack"]["mean"] <= 1.0
    np.save(tmp_path / "rows.npy", np.zeros((2, 1, 8, 8), dtype=np.float32))
    command = ["predict", str(home), "--input", str(tmp_path / "rows.npy"), "--client", "2", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 2
    assert (home / "metrics.jsonl").read_bytes() == before
    config = (home / "config.toml").read_text("utf-8")
    assert '[[method]]\nname = "fedproto"' in config
    body = config.partition(digests.COMMENT)[0]
    (home / "config.toml").write_bytes(digests.toml_with_digest(body.replace("weight = 1.0", "weight = 2.0")))
    assert main(["attack", str(home), "--attack", "membership_threshold"]) == 2
    assert re.search(r"holds another run: its method is .FedProto\(restart=None, weight=1\.0", capsys.readouterr().err)


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_with_its_method(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Lines, done: int, total: int, epsilon: float | None = None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    study = whole(method=WHOLE["method"][1:], study={"name": "one", "seeds": [1]})
    path, folder = write(tmp_path, study), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Lines, "round", stop)
        assert main(["run", str(path), "--folder", str(folder)]) == 130
    assert main(["run", str(path), "--folder", str(folder), "--resume"]) == 0
    (one,) = results(folder).values()
    other = results(finished)["local-relu1--fedproto-0.5--none--seed1"]
    for name in ("test", "validation", "loss"):
        assert [entry[name] for entry in one["history"]] == [entry[name] for entry in other["history"]]


def test_tables_tell_methods_apart(finished: Path) -> None:
    table = pd.read_csv(finished / "results.csv")
    assert list(table["method"]) == ["none"] * 2 + ["fedproto(weight=0.5)"] * 2


@pytest.mark.exhaustive
def test_optimizers_and_first_weights_are_told_in_plan_results_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {**WHOLE["training"], "rounds": 1, "restart_optimizers": True, "starts": "own"}
    methods = [{"name": "fedavg"}, {"name": "fedproto", "restart": False}]
    study = whole(training=training, method=methods, study={"name": "begun", "seeds": [0]})
    path = write(tmp_path, study)
    assert main(["plan", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    nothing = "(starts = 'own' changes nothing: all that clients hold is sent to them before they first train)"
    assert f"+ fedavg *: optimizers are restarted every round; clients start from shared weights {nothing}" in said
    kept = "optimizers keep their state from round to round; clients start from weights of their own"
    assert f"+ fedproto(restart=false, weight=1) *: {kept}" in said
    assert main(["run", str(path), "--folder", str(tmp_path / "out")]) == 0
    assert nothing[1:-1] in " ".join(capsys.readouterr().out.split())
    told = {one["method"]: (one["restart_optimizers"], one["starts"]) for one in results(tmp_path / "out").values()}
    expected = {"fedavg": (True, "shared"), "fedproto(restart=false, weight=1)": (False, "own")}
    assert told == expected
    table = pd.read_csv(tmp_path / "out" / "results.csv")
    columns = zip(table["method"], table["restart_optimizers"], table["starts"], strict=True)
    assert {method: (restart, starts) for method, restart, starts in columns} == told
    assert main(["report", str(tmp_path / "out")]) == 0
    page = " ".join((tmp_path / "out" / "report.html").read_text("utf-8").split())
    assert "optimizers are restarted every round; clients start from shared weights" in page
    assert kept in page
    (cell,) = (c for c in checked(study).cells if c.method.name == "fedproto")
    assert checked(tomllib.loads(dumps(cell.config))).cells[0].training == cell.training


def test_settings_of_a_study_that_are_none_are_refused() -> None:
    for key, value, text in (
        ("starts", "owned", r"training\.starts: 'owned' is not allowed; expected 'shared' or 'own'"),
        ("restart_optimizers", "yes", r"training\.restart_optimizers: 'yes' is not allowed; expected true or false"),
    ):
        with pytest.raises(InvalidInput, match=text):
            checked(whole(training={**WHOLE["training"], key: value}))
