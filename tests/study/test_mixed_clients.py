"""Clients that differ within a study: models, cuts, batch sizes, defenses and speeds of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import splitfed as sf
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import NameResolver
from splitfed.study.config import build
from splitfed.study.config.search import read_search
from splitfed.study.config.search_space import list_points
from splitfed.study.report.summary import summarise
from splitfed.study.run import checked_study, session
from splitfed.study.run.progress import Lines
from splitfed.topologies import vanilla
from splitfed.topologies.shared_segments import share_segments
from tests.study.examples import assert_one_mistake, checked, small, write

DATA: dict[str, Any] = {"name": "digits", "victims": 8, "auxiliary": 32, "clients": 3, "minimum": 2}
SHALLOW = {"name": "mlp", "hidden": [16], "cut": "relu1"}
DEEP = {"name": "mlp", "hidden": [20, 16], "cut": "relu2"}
WHOLE = [{"name": "mlp", "hidden": [16], "cuts": ["relu1"]}, {"name": "mlp", "hidden": [20, 16], "cuts": ["relu2"]}]
SPLIT: dict[str, Any] = {
    "data": DATA,
    "model": [SHALLOW, {**DEEP, "clients": [1]}],
    "training": {"rounds": 1, "batch_size": {"default": 32, "1": 16}, "schedule": "splitfed_v3"},
    "topology": [{"name": "vanilla"}],
    "defense": [{"name": "none"}, {"name": "noise", "scale": 0.5, "clients": [1]}],
    "attack": None,
}


def split(**changes: Any) -> dict[str, Any]:
    return small(**{**SPLIT, **changes})


def trained(**changes: Any) -> dict[str, Any]:
    return split(training={**SPLIT["training"], **changes})


WRONG: list[tuple[dict[str, Any], str]] = [
    (split(model=[], topology=[{"name": "vanilla", "cut": "relu1"}]), r"model: is missing; topology\[0\] cuts a model"),
    (split(model=[SHALLOW, {"hidden": [2]}]), r"model\[1\]\.name: is missing; expected text"),
    (
        split(model={"hidden": [2]}, topology=[{"name": "vanilla", "cut": "relu1"}]),
        r"model\.name: is missing; expected text",
    ),
    (split(model=[SHALLOW, {**DEEP, "name": "mpl"}]), r"model\[1\]\.name: unknown model 'mpl'; did you mean 'mlp'"),
    (split(model=[SHALLOW, {**DEEP, "hiden": [2]}]), r"model\[1\]\.hiden: unknown key 'hiden'; did you mean 'hidden'"),
    (
        split(model={"name": "mlp", "clients": [0]}, topology=[{"name": "vanilla", "cut": "relu1"}]),
        r"model\.clients: unknown key 'clients'",
    ),
    (
        split(model=[SHALLOW, {**DEEP, "clients": 1}]),
        r"model\[1\]\.clients: 1 is not allowed; expected a list of clients, numbered from 0",
    ),
    (
        split(model=[SHALLOW, {**DEEP, "clients": [3]}]),
        r"model\[1\]\.clients: 3 is not allowed; there are 3 clients, numbered from 0",
    ),
    (
        split(model=[{**SHALLOW, "clients": [0, 1, 2]}, {**DEEP, "clients": [1]}]),
        r"model\[1\]\.clients: client 1 has model\[0\]; expected one model a client",
    ),
    (
        split(model=[{**SHALLOW, "clients": [0]}, {**DEEP, "clients": [1]}]),
        r"model: client 2 has none; name it in clients, or leave clients out of a table for all that are left",
    ),
    (
        split(model=[{**SHALLOW, "clients": [0, 1, 2]}, DEEP]),
        r"model\[1\]: no client is left for it; there are 3 clients",
    ),
    (split(model=[SHALLOW, DEEP, SHALLOW]), r"model\[2\]: is the same as model\[0\]: add its clients there"),
    (
        split(model=[SHALLOW, {**DEEP, "cut": ["relu2"]}]),
        r"model\[1\]\.cut: \['relu2'\] is not allowed; expected the name of a submodule",
    ),
    (split(model=[SHALLOW, {**DEEP, "cut": "auto"}]), r"model\[1\]\.cut: 'auto' is for one model"),
    (split(model=[SHALLOW, {**DEEP, "cuts": ["relu2"]}]), r"model\[1\]\.cuts: unknown key 'cuts'; did you mean 'cut'"),
    (
        split(topology=[{"name": "vanilla", "cut": "relu1"}]),
        r"topology\[0\]\.cut: is used by no model: every \[\[model\]\] has its own cut",
    ),
    (
        split(model=[SHALLOW, {"name": "mlp", "hidden": [20, 16]}], topology=[{"name": "vanilla", "cut": "auto"}]),
        r"topology\[0\]\.cut: 'auto' is for one model; give every \[\[model\]\] its own cut",
    ),
    (
        split(model=[SHALLOW, {"name": "mlp", "hidden": [20, 16]}]),
        r"topology\[0\]\.cut: is missing; expected text",
    ),
    (
        split(model=[SHALLOW, {**DEEP, "cut": "relu9"}]),
        r"topology\[0\]: mlp\(hidden=20\+16\) cut=relu9 of client 1: unknown submodule of Mlp 'relu9'; did you",
    ),
    (
        split(model=[SHALLOW, {**DEEP, "cut": "relu1"}]),
        r"topology\[0\]: segment 'top', which clients share, has another architecture for client 1 than for the first "
        r"client \(weights 16x20, 16, 10x16, 10, not 10x16, 10\): cut these models so that their last pieces match",
    ),
    (
        split(training={"rounds": 1, "schedule": "splitfed_v1"}),
        r"topology\[0\]: schedule SplitFedV1 averages client segments, which differ here: take one that leaves them",
    ),
    (
        split(
            model=WHOLE,
            topology=[{"name": "local"}],
            method=[{"name": "fedavg"}],
            training={"rounds": 1, "schedule": "independent"},
            defense=[{"name": "none"}],
        ),
        r"method\[0\]: fedavg averages .*",
    ),
    (split(encryption=[{}]), r"encryption: is for clients that have one model"),
    (trained(batch_size=0), r"training\.batch_size: 0 is not allowed; expected a whole number of at least 1"),
    (trained(batch_size=[32, 16]), r"training\.batch_size: has 2 entries; expected 3, one a client \(a list here is "),
    (trained(batch_size=[32, 16, "8"]), r"training\.batch_size\[2\]: '8' is not allowed; expected a whole number"),
    (trained(batch_size={"0": 8, "1": 8}), r"training\.batch_size: has nothing for client 2; add default = "),
    (trained(batch_size={"default": 8, "3": 8}), r"training\.batch_size\.3: is no client; expected default, or a "),
    (trained(batch_size={"default": 0}), r"training\.batch_size\.default: 0 is not allowed; expected a whole number"),
    (
        split(defense=[{"name": "noise", "clients": [3]}]),
        r"defense\[0\]: Noise client=3 is not allowed: there are 3 clients, numbered from 0",
    ),
    (
        trained(speeds={"named": {"client3": {"compute": 1e9}}}),
        r"training\.speeds: unknown party or role with a speed 'client3'; did you mean 'client",
    ),
]


@pytest.mark.parametrize(("study", "pattern"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_mistake_is_one_line(study: dict[str, Any], pattern: str) -> None:
    assert_one_mistake(study, pattern)


def test_who_has_which() -> None:
    """Those whom no table names take turns with the tables that name nobody; it is written out for every run."""

    def holders(models: list[dict[str, Any]]) -> list[list[int]]:
        (cell,) = checked(split(model=models, data={**DATA, "clients": 5}, defense=[{"name": "none"}], **PLAIN)).cells
        assert [table["clients"] for table in cell.config["model"]] == [list(one.clients) for one in cell.models]
        again = checked(dict(cell.config)).cells[0]
        assert again.models == cell.models
        assert again.config == cell.config
        return [list(one.clients) for one in cell.models]

    third = {"name": "mlp", "hidden": [9, 16], "cut": "relu2"}
    assert holders([SHALLOW, DEEP]) == [[0, 2, 4], [1, 3]]
    assert holders([SHALLOW, DEEP, {**third, "clients": [1]}]) == [[0, 3], [2, 4], [1]]
    assert holders([{**SHALLOW, "clients": [4, 0]}, DEEP]) == [[0, 4], [1, 2, 3]]


PLAIN: dict[str, Any] = {"training": {"rounds": 1, "schedule": "splitfed_v3"}}


def test_some_models_are_cut_where_the_topology_says() -> None:
    models = [{"name": "mlp", "hidden": [16]}, DEEP]
    study = split(model=models, topology=[{"name": "vanilla", "cut": ["relu1"]}], defense=[{"name": "none"}])
    study["data"] = {**DATA, "clients": 2}
    study |= PLAIN
    grid = checked(study)
    assert [cell.topology.part.label for cell in grid.cells] == ["vanilla(cut=relu1)"]
    assert grid.cells[0].model_label.startswith("mlp(hidden=16) of client 0 + mlp(hidden=20+16) cut=relu2 of client")
    first = build.topologies(grid.cells[0], sf.data.digits())
    assert isinstance(first, tuple)
    assert [len(list(t.segments[0].module.parameters())) for t in first] == [2, 4]
    assert first[0].segments[1].module is first[1].segments[1].module


def test_a_server_that_does_something_else_is_not_shared() -> None:
    """Weights of the same shapes, and tanh in the place of a ReLU."""

    def net(last: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), last, torch.nn.Linear(4, 2))

    rows = {"input": torch.randn(5, 3)}
    topologies = [vanilla(net(last), "0") for last in (torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.Tanh())]
    rows = {next(iter(topologies[0].inputs)): torch.randn(5, 3)}
    one, other = share_segments(topologies[:2], rows)
    assert one.segments[1].module is other.segments[1].module
    assert one.segments[0].module is not other.segments[0].module
    with pytest.raises(
        InvalidInput, match=r"for client 2 than .* \(different outputs with the same weights\): cut these"
    ):
        share_segments(topologies, rows)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The split study, run: a folder of results."""
    folder = tmp_path_factory.mktemp("mixed")
    study = split(method=[{"name": "fedproto"}])
    study["training"] |= {"rounds": 2, "speeds": {"default": {"compute": 1e9}, "named": {"client1": {"compute": 1e6}}}}
    path = write(folder, study)
    assert main(["run", str(path), "--folder", str(folder / "out")]) == 0
    return folder / "out"


@pytest.mark.exhaustive
def test_who_has_which_is_told_everywhere(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = "mlp(hidden=16) cut=relu1 of clients 0, 2 + mlp(hidden=20+16) cut=relu2 of client 1"
    table = pd.read_csv(done / "results.csv")
    assert set(table["model"]) == {label}
    result = json.loads((done / "runs" / "vanilla-by-model--none--seed0" / "result.json").read_text())
    definition = json.loads((done / "runs" / "vanilla-by-model--none--seed0" / "run.json").read_text())
    assert definition["makes"] == [0, 1, 0]
    assert [one["batch_size"] for one in result["clients_differ"]] == [32, 16, 32]
    models = [one["model"] for one in result["clients_differ"]]
    assert models == ["mlp(hidden=16) cut=relu1", "mlp(hidden=20+16) cut=relu2", "mlp(hidden=16) cut=relu1"]
    assert all(s["predicted"]["agrees"] for s in summarise(done)["settings"])
    page = (done / "report.html").read_text()
    assert '<td>1</td><td class="text">mlp(hidden=20+16) cut=relu2</td><td>16</td>' in page
    assert "noise(scale=0.5, clients=1)" in page
    assert main(["plan", str(done.parent / "study.toml"), "--schedules", "splitfed_v3"]) == 0
    said = capsys.readouterr().out
    assert "\nclients 0, 2: mlp(hidden=16) cut=relu1\nclient 1: mlp(hidden=20+16) cut=relu2\n" in said
    assert "\nclients 0, 2: batch size 32\nclient 1: batch size 16\n" in said


def test_a_slow_client_takes_its_time(done: Path) -> None:
    runs = [json.loads((one / "result.json").read_text()) for one in sorted((done / "runs").iterdir())]
    assert all(run["history"][-1]["simulated_seconds"] > 0 for run in runs)
    assert all(run["history"][-1]["simulated_seconds"] == pytest.approx(run["predicted"]["seconds"]) for run in runs)


@pytest.mark.exhaustive
def test_a_run_is_loaded_and_goes_on(done: Path) -> None:
    """As it was: every client with its own model, and the server that all share; further rounds as if planned."""
    folder = done / "runs" / "vanilla-by-model--noise-0.5-1--seed0"
    run = sf.load(folder)
    sizes = [sum(p.numel() for p in run.engine.modules(c)["bottom"].parameters()) for c in range(3)]
    assert sizes == [64 * 16 + 16, 64 * 20 + 20 + 20 * 16 + 16, 64 * 16 + 16]
    assert run.history[-1]["test"] == json.loads((folder / "result.json").read_text())["history"][-1]["test"]
    run.continue_training(1)
    assert len(run.history) == 3


@pytest.mark.exhaustive
def test_an_interrupted_study_ends_in_the_same_bits(done: Path, tmp_path: Path) -> None:
    """Without its newest checkpoint and its result, as a crash would have left it."""
    name = "vanilla-by-model--none--seed0"
    study = (done / "study.toml").read_text()
    (tmp_path / "study.toml").write_text(study)
    ready = checked_study.prepare_study(tmp_path / "study.toml")
    cells = {cell.id: cell for cell in ready.grid.cells}
    run = sf.load(done / "runs" / name)
    whole = run.state()

    class Stop(Lines):
        def round(self, done: int, total: int, **more: Any) -> None:
            if done == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.run_cell(cells[name], ready.data, tmp_path / "run", Stop(1))
    session.run_cell(cells[name], ready.data, tmp_path / "run", Lines(1))
    again = sf.load(tmp_path / "run").state()
    for part in whole:
        if part.startswith("party-"):
            assert str(whole[part]) == str(again[part]), part


def test_a_search_varies_what_clients_that_differ_have_in_common() -> None:
    study = split(defense=[{"name": "none"}])
    study["training"] = {**SPLIT["training"], "batch_size": {"choice": [32, [32, 16, 8]]}}
    study["search"] = {"sampler": "grid", "objectives": {"utility": "maximize"}}
    search, first = read_search(study, "study.toml", Path(), NameResolver(Path()))
    sizes = [search.expand(point).cells[0].training.batch_size for point in list_points(search.tree)]
    assert sizes == [32, (32, 16, 8)]
    assert search.resolved(study, first)["model"] == [SHALLOW, {**DEEP, "clients": [1]}]
