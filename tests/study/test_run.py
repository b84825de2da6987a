"""A small real study through the command line: results, resuming after an interruption, workers, failures."""

from __future__ import annotations

import copy
import importlib
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.tasks import classification
from splitfed.costs.speeds import Speeds
from splitfed.models.mlp import mlp
from splitfed.study.config.mistakes import InvalidStudy, Mistakes
from splitfed.study.config.toml import dumps
from splitfed.study.config.values import read_table, table_of
from splitfed.study.report.exposure import role_holdings
from splitfed.study.run.progress import Lines
from splitfed.study.run.store import StudyFolder
from splitfed.topologies import vanilla
from splitfed.training import checkpoint
from tests.examples import images
from tests.study.examples import checked, small, write
from tests.study.test_config import JUNK, mutate
from tests.thinning import thin

IDS = ["vanilla-relu1--none--seed0", "vanilla-relu1--noise-0.5--seed0", "vanilla-relu1--noise-1--seed0"]


def run(path: Path, folder: Path, *more: str) -> int:
    return main(["run", str(path), "--folder", str(folder), *more])


def timeless(value: Any) -> Any:
    """Leave out what the clock decides."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in ("seconds", "digest")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def outcome(folder: Path) -> dict[str, Any]:
    """Return everything a study found: results, predictions and weights."""
    found = {}
    for home in sorted((folder / "runs").iterdir()):
        found[home.name] = {"result": timeless(json.loads((home / "result.json").read_text("utf-8")))}
        found[home.name]["attack"] = load_file(home / "attacks" / "rmle.safetensors")["prediction"].tolist()
        newest = checkpoint.load(home / "checkpoints")
        assert newest is not None
        assert newest.number == 1
        found[home.name]["weights"] = [t.tolist() for t in tensors(newest.states["party-client0"])]
    return found


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in inner for tensor in tensors(item)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that ran through without an interruption."""
    home = tmp_path_factory.mktemp("study")
    assert run(write(home, small()), home / "out") == 0
    return home / "out"


def test_the_folder_holds_what_was_asked_and_what_was_found(finished: Path) -> None:
    assert tomllib.loads((finished / "study.toml").read_text("utf-8")) == small()
    assert json.loads((finished / "environment.json").read_text("utf-8"))["packages"]["torch"]
    assert (finished / "report.html").is_file()
    assert sorted(path.name for path in (finished / "runs").iterdir()) == sorted(IDS)
    found = json.loads((finished / "runs" / IDS[1] / "result.json").read_text("utf-8"))
    assert found["defense"] == {
        "label": "noise(scale=0.5, relative=true)",
        "name": "noise",
        "strength": 0.5,
        "strength_parameter": "scale",
        "strength_unit": "deviations of the batch's release",
        "stronger": "more",
        "guarantee": "no formal guarantee",
        "parts": [{"name": "noise", "parameters": {"scale": 0.5, "relative": True}}],
    }
    assert found["topology"]["label"] == "vanilla(cut=relu1)"
    # 1797 - 8 - 32 = 1757 rows at the client, of which 176 validate and 351 test: 1230 train, 20 batches of 64.
    # A step: 64 x 12 activations and as many gradients of 4 bytes, and 64 labels of 8 bytes; two epochs.
    assert found["bytes_by_kind"] == {"activation": 2 * 1230 * 48, "gradient": 2 * 1230 * 48, "label": 2 * 1230 * 8}
    assert found["bytes"] == sum(found["bytes_by_kind"].values())
    assert found["messages"] == 2 * 20 * 3
    assert found["rounds"] == len(found["history"]) == 2
    assert found["utility"]["test"] == found["history"][-1]["test"]["union"]
    assert found["dependence"]["edge"] == "bottom->top"
    assert 0 < found["dependence"]["p_value"] <= 1
    assert "topology_svg" not in found
    assert found["topology_graph"]["defended"] == {"bottom->top": "noise(scale=0.5, relative=true)"}


def test_scores_can_be_worked_out_from_the_tensors(finished: Path) -> None:
    home = finished / "runs" / IDS[0]
    (attack,) = json.loads((home / "result.json").read_text("utf-8"))["attacks"]
    pair = load_file(home / attack["file"])
    assert pair["prediction"].shape == pair["truth"].shape == (8, 1, 8, 8)
    error = (pair["prediction"].double() - pair["truth"].double()).square().flatten(1).mean(1)
    assert attack["scores"]["mse"]["attack"]["mean"] == pytest.approx(float(error.mean()), rel=1e-6)
    assert attack["scores"]["psnr"]["attack"]["mean"] == pytest.approx(float((-10 * error.log10()).mean()), rel=1e-6)
    assert attack["adversary"] == "server"
    assert attack["victims"] == 8


def test_the_tables_hold_a_row_a_run_and_attack(finished: Path) -> None:
    table = pd.read_csv(finished / "results.csv")
    assert list(table["run"]) == IDS
    # What is undefended has no strength: of an epsilon, 0 would be the strongest.
    assert pd.isna(table["strength"][0])
    assert list(table["strength"][1:]) == [0.5, 1.0]
    assert list(table["strength_parameter"][1:]) == ["scale", "scale"]
    for column, kept in (("utility_low", "low"), ("utility_high", "high"), ("utility_interval", "kind")):
        assert (
            table[column][0]
            == json.loads((finished / "runs" / IDS[0] / "result.json").read_text("utf-8"))["utility"]["interval"][kept]
        )
    assert (table["utility_low"] < table["utility"]).all()
    assert (table["utility"] < table["utility_high"]).all()
    assert set(table["utility_interval"]) == {"Wilson over rows"}
    first = json.loads((finished / "runs" / IDS[0] / "result.json").read_text("utf-8"))
    assert table["psnr"][0] == first["attacks"][0]["scores"]["psnr"]["attack"]["mean"]
    assert table["psnr_mean_image"][0] == first["attacks"][0]["scores"]["psnr"]["mean_image"]["mean"]
    assert table["utility"][0] == first["utility"]["test"]
    assert list(pd.read_parquet(finished / "results.parquet").columns) == list(table.columns)


def stop_at_finish() -> Callable[..., None]:
    def finish(self: Lines, line: str, failed: bool = False) -> None:
        raise KeyboardInterrupt

    return finish


def stop_in_second_run() -> Callable[..., None]:
    seen = 0

    def round(self: Lines, done: int, total: int, epsilon: float | None = None) -> None:
        nonlocal seen
        seen += 1
        # Two rounds a run: the third call is the first round of the second run.
        if seen == 3:
            raise KeyboardInterrupt

    return round


@pytest.mark.parametrize(("event", "stop"), thin([("round", stop_in_second_run), ("finish", stop_at_finish)], 2))
def test_an_interrupted_study_ends_in_the_same_bits(
    event: str,
    stop: Callable[[], Callable[..., None]],
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, folder = write(tmp_path, small()), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Lines, event, stop())
        assert run(path, folder) == 130
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("interrupted; what is finished is kept: go on with splitfed run ")
    assert told.endswith(" --resume")
    done = [name for name in IDS if (folder / "runs" / name / "result.json").is_file()]
    assert done == IDS[:1]
    half = folder / "runs" / IDS[1]
    assert half.exists() == (event == "round")
    first = (half / "metrics.jsonl").read_text("utf-8") if half.exists() else ""
    assert len(first.splitlines()) == (1 if event == "round" else 0)
    assert run(path, folder) == 2
    assert "holds this study already; add --resume" in capsys.readouterr().err
    kept = (folder / "runs" / IDS[0] / "result.json").stat().st_mtime_ns
    assert run(path, folder, "--resume") == 0
    assert (folder / "runs" / IDS[0] / "result.json").stat().st_mtime_ns == kept
    assert outcome(folder) == outcome(finished)
    # A half-trained run goes on from its checkpoint: the line holds the seconds that the round took, and had it been
    # trained again, they would differ.
    assert (half / "metrics.jsonl").read_text("utf-8").startswith(first)


def test_another_study_is_refused(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path, small(training={"rounds": 3, "batch_size": 64}))
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert run(other, finished, "--resume") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("holds another study: its training.rounds is 2, not 3; give another folder")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_folder_with_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = write(tmp_path, small()), tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    assert run(path, folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("is not empty and holds no study; give a new or empty folder")
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "left", [[".lock"], [".lock", "data.json", "environment.json"], [".lock", "config.toml", ".study.toml.tmp"]]
)
def test_a_folder_in_which_a_study_had_just_begun_is_taken(left: list[str], finished: Path, tmp_path: Path) -> None:
    """A crash came after the lock, and before the study had been described."""
    folder = tmp_path / "out"
    folder.mkdir()
    for name in left:
        whole = digests.json_with_digest({"data_digest": "rows"}).decode()
        (folder / name).write_text(whole if name == "data.json" else "half")
    home, grid = StudyFolder(folder), checked(small())
    home.check(grid, "rows", resume=True)
    with home.lock():
        home.claim(grid, "text", "rows")
    home.check(grid, "rows", resume=True)
    (folder / "thesis.tex").write_text("mine")
    (folder / "study.toml").unlink()
    with pytest.raises(InvalidInput, match="is not empty and holds no study"):
        home.check(grid, "rows", resume=True)


def test_a_folder_is_waited_for_only_as_long_as_a_killed_process_may_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = importlib.import_module("splitfed.study.run.store")
    asked = []

    def take(file: Any) -> bool:
        asked.append(file.name)
        return len(asked) == 3

    monkeypatch.setattr(store, "_take", take)
    with StudyFolder(tmp_path).lock():
        assert asked == [str(tmp_path / ".lock")] * 3
    monkeypatch.setattr(store, "_take", lambda file: False)
    monkeypatch.setattr(store, "PATIENCE", 0.05)
    with pytest.raises(InvalidInput, match=r"^another process is at work in "), StudyFolder(tmp_path).lock():
        raise AssertionError("it was taken")


def test_a_training_that_diverges_is_recorded_and_the_study_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = small(defense=[{"name": "none"}, {"name": "noise", "scale": 1e38}])
    path, folder = write(tmp_path, study), tmp_path / "out"
    assert run(path, folder, "--json") == 0
    told = capsys.readouterr()
    settings = json.loads(told.out.splitlines()[-1])["settings"]
    assert [(row["seeds"], row["failed"]) for row in settings] == [(1, 0), (0, 1)]
    broken = json.loads((folder / "runs" / "vanilla-relu1--noise-1e+38--seed0" / "result.json").read_text("utf-8"))
    assert len(broken["failed"].splitlines()) == 1
    assert any("failed: " in line for line in told.err.splitlines())
    table = pd.read_csv(folder / "results.csv")
    assert list(table["failed"].isna()) == [True, False]
    assert run(path, folder, "--resume") == 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_workers_find_the_same(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert run(write(tmp_path, small()), folder, "--workers", "2") == 0
    assert outcome(folder) == outcome(finished)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("]")[0] for line in lines] == ["[1/3", "[2/3", "[3/3"]
    assert not (folder / "study.db").exists()


def test_a_run_is_attacked_again_without_training(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, folder = finished / "runs" / IDS[0], tmp_path / "run"
    for path in home.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(home)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    trained = (folder / "metrics.jsonl").read_bytes()
    assert main(["attack", str(folder), "--attack", "inverse_network,rmle", "--budget", "quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [attack["attack"] for attack in found] == ["inverse_network", "rmle-budget-quick"]
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert [attack["attack"] for attack in result["attacks"]] == ["rmle", "inverse_network", "rmle-budget-quick"]
    assert (folder / "metrics.jsonl").read_bytes() == trained
    assert load_file(folder / "attacks" / "inverse_network.safetensors")["prediction"].shape == (8, 1, 8, 8)
    # Three hundred iterations come closer than the study's five.
    scores = {attack["attack"]: attack["scores"]["mse"]["attack"]["mean"] for attack in result["attacks"]}
    assert scores["rmle-budget-quick"] < scores["rmle"]


def test_attack_refuses_what_is_no_run(tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", str(tmp_path), "--attack", "rmle"]) == 2
    assert "holds no finished run; expected a folder .../runs/NAME" in capsys.readouterr().err
    assert main(["attack", str(finished / "runs" / IDS[0]), "--attack", "rlme"]) == 2
    assert capsys.readouterr().err.startswith("attack: rlme.name: unknown attack 'rlme'; did you mean 'rmle'")


SPEEDS: dict[str, Any] = {
    "default": {"compute": 1e8, "up": 1e5, "down": 2e5, "latency": 0.01},
    "named": {"server": {"compute": 1e9}, "fed_server": {"up": 1e7}},
    "stragglers": {"client1": 4.0},
    "spread": 0.1,
    "seed": 3,
}


def two_schedules() -> dict[str, Any]:
    return small(
        data={"name": "digits", "victims": 8, "auxiliary": 32, "clients": 2},
        training={"rounds": 2, "batch_size": 64, "schedule": ["sequential", "splitfed_v1"], "speeds": SPEEDS},
        defense=[{"name": "none"}],
    )


@pytest.mark.exhaustive
@pytest.mark.drawn
def test_two_schedules_and_speeds_from_file_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = write(tmp_path, two_schedules()), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Lines, "finish", stop_at_finish())
        assert run(path, folder) == 130
    assert run(path, folder, "--resume", "--json") == 0
    settings = json.loads(capsys.readouterr().out.splitlines()[-1])["settings"]
    assert [row["schedule"] for row in settings] == ["sequential", "splitfed_v1"]
    names = [f"vanilla-relu1--{name}--none--seed0" for name in ("sequential", "splitfed_v1")]
    assert sorted(p.name for p in (folder / "runs").iterdir()) == names
    found = [json.loads((folder / "runs" / name / "result.json").read_text("utf-8")) for name in names]
    for one in found:
        times = [entry["simulated_seconds"] for entry in one["history"]]
        assert 0 < times[0] < times[1] == pytest.approx(one["predicted"]["seconds"], rel=1e-9)
        assert one["bytes_by_kind"] == one["predicted"]["bytes_by_kind"]
        assert one["sizes"]["cut_width"] == 12
    # One client after the other takes longer than both at once; the aggregation server's weights cross twice a round.
    assert found[0]["history"][-1]["simulated_seconds"] > found[1]["history"][-1]["simulated_seconds"]
    client = 4 * (64 * 12 + 12)
    assert found[0]["bytes_by_kind"]["weights"] == 3 * client
    assert found[1]["bytes_by_kind"]["weights"] == 2 * 2 * 2 * client
    assert [[p["role"] for p in one["parties"]] for one in found] == [
        ["client", "server"],
        ["client", "server", "fed_server"],
    ]
    report = (folder / "report.html").read_text("utf-8")
    assert "Accuracy against simulated time" in report
    table = pd.read_csv(folder / "results.csv")
    assert list(table["schedule"]) == ["sequential", "splitfed_v1"]
    assert list(table["simulated_seconds"]) == [one["history"][-1]["simulated_seconds"] for one in found]
    assert tomllib.loads((folder / "config.toml").read_text("utf-8"))["training"]["speeds"] == SPEEDS | {
        "default": SPEEDS["default"],
        "named": {
            "server": {"compute": 1e9, "up": math.inf, "down": math.inf, "latency": 0.0},
            "fed_server": {"compute": math.inf, "up": 1e7, "down": math.inf, "latency": 0.0},
        },
    }
    # A run's own config means that run alone, with its schedule and the same clock.
    (cell,) = checked(tomllib.loads((folder / "runs" / names[1] / "config.toml").read_text("utf-8"))).cells
    assert cell.training == checked(two_schedules()).cells[1].training
    assert main(["attack", str(folder / "runs" / names[1]), "--attack", "rmle", "--budget", "quick", "--json"]) == 0


def test_who_sees_what_is_told_by_the_run(finished: Path) -> None:
    client, server = json.loads((finished / "runs" / IDS[1] / "result.json").read_text("utf-8"))["parties"]
    assert (client["parties"], client["labels"], client["losses"]) == (1, ["fc2"], [])
    assert client["segments"] == [{"name": "bottom", "parameters": 64 * 12 + 12}]
    told = [(e["kind"], e["value"], e["shape"], e["bytes"], e["from"]) for e in client["receives"]]
    assert told == [("gradient", "relu1", [12], 48, "server")]
    activation, label = server["receives"]
    assert (activation["kind"], activation["value"], activation["bytes"]) == ("activation", "relu1", 48)
    assert activation["returns"]
    assert activation["guard"] == "noise(scale=0.5, relative=true)"
    assert (label["kind"], label["bytes"], label["from"], label["guard"]) == ("label", 8, "client", "")


def test_a_guard_stands_where_its_defense_acts() -> None:
    topology = vanilla(mlp((1, 8, 8), 10, (12,)), "relu1").with_task(classification(10))
    x, y = images(4)
    roles = {"client0": "client", "server": "server"}
    facts = pass_example(topology, dict.fromkeys(topology.inputs, x))
    (edge,) = topology.crossings
    labels = {topology.heads[0].value: y}
    client, server = role_holdings(topology, facts, labels, {edge.name: "noise"}, {edge.name: "clip"}, {}, roles)
    assert [(entry["kind"], entry["guard"]) for entry in client["receives"]] == [("gradient", "clip")]
    assert [(entry["kind"], entry["guard"]) for entry in server["receives"]] == [("activation", "noise"), ("label", "")]


def test_one_schedule_in_a_list_is_one_schedule(finished: Path) -> None:
    plain = checked(small())
    listed = checked(small(training={"rounds": 2, "batch_size": 64, "schedule": ["sequential"]}))
    assert plain == listed
    assert [cell.id for cell in plain.cells] == IDS
    # A folder from before speeds and lists of schedules goes on: its config says nothing of either.
    assert digests.toml_with_digest(dumps(plain.resolved)) == (finished / "config.toml").read_bytes()
    assert "speeds" not in tomllib.loads(dumps(plain.resolved))["training"]


def test_parameters_of_a_schedule_give_a_grid() -> None:
    given = ["sequential", {"name": "splitfed_v1", "quorum": [1, 2]}]
    study = two_schedules()
    study["training"] |= {"schedule": given}
    assert [cell.id.split("--")[1] for cell in checked(study).cells] == [
        "sequential",
        "splitfed_v1",
        "splitfed_v1-2",
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schedule": 3}, "training.schedule: 3 is not allowed; expected a name, a table with a name, or a list of those"),
    ({"schedule": []}, "training.schedule: [] is not allowed; expected at least one schedule"),
    ({"schedule": ["sequential", 3]}, "training.schedule[1]: 3 is not allowed; expected a name"),
    ({"schedule": ["blind", "blnd"]}, "training.schedule[1].name: unknown schedule 'blnd'; did you mean 'blind'?"),
    ({"schedule": ["blind", "blind"]}, "training.schedule: blind is there 2 times; expected once"),
    ({"schedule": ["blind", "joint"]}, "training.schedule[1]: schedule 'joint' trains one group of parties"),
    ({"schedule": {"name": "splitfed_v1", "quorum": 0}}, "training.schedule.quorum: quorum=0 is not allowed"),
    ({"speeds": 3}, "training.speeds: 3 is not allowed; expected a table with default, named, str"),
    ({"speeds": {"defualt": {}}}, "training.speeds.defualt: unknown key 'defualt'; did you mean 'default'?"),
    ({"speeds": {"default": 1e9}}, "training.speeds.default: 1000000000.0 is not allowed; expected a table with com"),
    ({"speeds": {"default": {"cpu": 1}}}, "training.speeds.default.cpu: unknown key 'cpu'"),
    ({"speeds": {"default": {"up": "fast"}}}, "training.speeds.default.up: 'fast' is not allowed; expected a number"),
    ({"speeds": {"default": {"up": -1}}}, "training.speeds.default.up: up=-1 is not allowed; expected a number in (0"),
    (
        {"speeds": {"named": {"server": {"latency": -1}}}},
        "training.speeds.named.server.latency: latency=-1 is not allowed",
    ),
    ({"speeds": {"named": ["server"]}}, "training.speeds.named: ['server'] is not allowed; expected a table of t"),
    ({"speeds": {"named": {"sever": {}}}}, "training.speeds: unknown party or role with a speed 'sever'; did you me"),
    ({"speeds": {"named": {"fed_server": {}}}}, "training.speeds: unknown party or role with a speed 'fed_server'"),
    ({"speeds": {"stragglers": {"client": 2}}}, "training.speeds: unknown straggler 'client'; did you mean 'client"),
    ({"speeds": {"stragglers": {"client0": 0}}}, "training.speeds: stragglers['client0']=0 is not allowed"),
    ({"speeds": {"stragglers": 4}}, "training.speeds.stragglers: 4 is not allowed; expected a table"),
    ({"speeds": {"spread": 11}}, "training.speeds.spread: spread=11 is not allowed; expected a number in [0, 10]"),
    ({"speeds": {"seed": -1}}, "training.speeds.seed: seed=-1 is not allowed; expected a whole number of at least 0"),
    ({"speeds": {"seed": 0.5}}, "training.speeds.seed: 0.5 is not allowed; expected a whole number"),
]


@pytest.mark.parametrize(("training", "text"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_mistake_in_schedules_or_speeds_is_one_line(training: dict[str, Any], text: str) -> None:
    study = two_schedules()
    study["training"] = {"rounds": 1, "batch_size": 64, **training}
    with pytest.raises(InvalidStudy) as caught:
        checked(study)
    assert len(caught.value.lines) == 1, caught.value.lines
    assert caught.value.lines[0].startswith(f"study.toml: {text}"), caught.value.lines[0]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    return mutate(draw, copy.deepcopy(SPEEDS))


@given(st.one_of(mutated(), JUNK))
@settings(max_examples=200, derandomize=True)
def test_any_speeds_are_valid_or_refused_in_lines(speeds: Any) -> None:
    mistakes = Mistakes("study.toml")
    found = read_table(mistakes, "training.speeds", Speeds, speeds)
    if mistakes:
        with pytest.raises(InvalidStudy) as caught:
            mistakes.stop()
        lines = caught.value.lines
        assert all(line.startswith("study.toml: training.speeds") and len(line.splitlines()) == 1 for line in lines)
        return
    assert isinstance(found, Speeds)
    # What is written back means the same.
    written = tomllib.loads(dumps({"t": table_of(found)}))["t"]
    assert read_table(mistakes, "training.speeds", Speeds, written) == found
