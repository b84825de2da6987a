"""Trials of a search: what they leave, that they are the runs alone, and that no interruption loses or repeats one."""

from __future__ import annotations

import copy
import csv
import json
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import optuna
import pytest

from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.study.report.search_data import read_search_outcome
from splitfed.study.run import checked_study, search as search_runs, session
from splitfed.study.run.progress import Lines
from splitfed.study.run.search_queue import SearchQueue
from splitfed.study.run.search_session import SearchSession
from splitfed.training import checkpoint
from tests.study.examples import write
from tests.study.search_examples import opened_by_optuna, records, run, searching
from tests.study.test_run import tensors, timeless
from tests.thinning import thin

ATTACKED: dict[str, Any] = {
    "search": {
        "trials": 3,
        "objectives": {"utility_validation": "maximize", "rmle.psnr": "minimize"},
        "constraints": ["rmle.psnr <= 7.9"],
    },
    "study": {"name": "search", "seeds": [0, 1, 2]},
    "attack": [{"name": "rmle", "iterations": 2}],
}


def attacked() -> dict[str, Any]:
    return searching(**copy.deepcopy(ATTACKED))


def weights(folder: Path, run_name: str) -> list[Any]:
    newest = checkpoint.load(folder / "runs" / run_name / "checkpoints")
    assert newest is not None
    return [t.tolist() for t in tensors(newest.states["party-client0"])]


def outcome(folder: Path) -> dict[str, Any]:
    """Return everything a search found, without what the clock decides."""
    found: dict[str, Any] = {"records": timeless(records(folder))}
    for home in sorted((folder / "runs").iterdir()):
        if (home / "result.json").is_file():
            result = timeless(json.loads((home / "result.json").read_text("utf-8")))
            found[home.name] = {"result": result, "weights": weights(folder, home.name)}
    return found


def do(study: dict[str, Any], home: Path) -> None:
    """Run a search in `home`/out, without its report."""
    session.run_study(checked_study.prepare_study(write(home, study)), home / "out")


def states(folder: Path) -> list[str]:
    """Read how trials ended without the library that wrote it."""
    database = sqlite3.connect(folder / "study.db")
    found = database.execute("select state from trials order by number").fetchall()
    database.close()
    return [state for (state,) in found]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("search")
    assert run(write(home, attacked()), home / "out") == 0
    return home / "out"


@pytest.mark.exhaustive
def test_every_trial_has_its_record_and_its_runs(finished: Path) -> None:
    found = records(finished)
    assert sorted(found) == [0, 1, 2]
    assert states(finished) == ["COMPLETE"] * 3
    runs = [name for record in found.values() for name in record["runs"]]
    assert sorted(runs) == sorted(home.name for home in (finished / "runs").iterdir())
    assert len(runs) == 9
    for record in found.values():
        results = [json.loads((finished / "runs" / name / "result.json").read_text("utf-8")) for name in record["runs"]]
        scores = [result["attacks"][0]["scores"]["psnr"]["attack"]["mean"] for result in results]
        psnr = record["metrics"]["rmle.psnr"]
        assert psnr["mean"] == pytest.approx(sum(scores) / 3, rel=1e-12)
        assert psnr["low"] < psnr["mean"] < psnr["high"]
        assert (psnr["n"], psnr["over"]) == (3, "seeds")
        mean = sum(result["utility"]["validation"] for result in results) / 3
        assert record["objectives"]["utility_validation"] == pytest.approx(mean, rel=1e-12)
        assert record["violations"] == {"rmle.psnr <= 7.9": pytest.approx((psnr["mean"] - 7.9) / 7.9, rel=1e-9)}
        assert record["feasible"] == (psnr["mean"] <= 7.9)
        assert [result["seed"] for result in results] == [0, 1, 2]
        assert {result["variant"] for result in results} == {
            f"optimizer.lr={record['parameters']['training.optimizer.lr']:g}"
        }


def test_optuna_has_the_same_trials(finished: Path) -> None:
    with opened_by_optuna(finished / "study.db") as storage:
        study = optuna.load_study(study_name="search", storage=storage)
        trials, directions = study.trials, study.directions
    for trial, record in zip(trials, records(finished).values(), strict=True):
        assert trial.values == list(record["objectives"].values())
        assert trial.params == record["parameters"]
    assert [direction.name for direction in directions] == ["MAXIMIZE", "MINIMIZE"]


def test_a_run_of_a_trial_is_the_run_alone(finished: Path, tmp_path: Path) -> None:
    name = records(finished)[1]["runs"][1]
    there = finished / "runs" / name
    assert run(there / "config.toml", tmp_path / "alone") == 0
    (alone,) = (tmp_path / "alone" / "runs").iterdir()
    results = [timeless(json.loads((place / "result.json").read_text("utf-8"))) for place in (there, alone)]
    for result in results:
        result.pop("id")
        result.pop("variant", None)
    assert results[0] == results[1]
    assert weights(finished, name) == weights(tmp_path / "alone", alone.name)


def test_the_tables_and_the_report_show_the_trials(finished: Path) -> None:
    with (finished / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = read_search_outcome(finished)
    assert found is not None
    assert [int(row["trial"]) for row in rows if row["front"] == "True"] == sorted(found.front)
    assert [float(row["rmle.psnr"]) for row in rows] == [r["metrics"]["rmle.psnr"]["mean"] for r in found.records]
    page = (finished / "report.html").read_text("utf-8")
    section = page.partition('<section id="search">')[2].partition("</section>")[0]
    assert "<svg" in section
    assert "Search by random: 3 trials" in section
    for record in found.best:
        assert all(name in section for name in record["runs"])
    # The sections below are about the front alone.
    below = page.partition('<section id="table">')[2]
    others = [r for r in found.records if r["trial"] not in found.front and r["setting"]["variant"]]
    assert all(r["setting"]["variant"] in below for r in found.best)
    assert not any(r["setting"]["variant"] in below for r in others)


def stop_before_result() -> Callable[..., None]:
    seen = 0

    def round(self: Lines, done: int, total: int, epsilon: float | None = None) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:  # the second run of the second trial
            raise KeyboardInterrupt

    return round


class Stopped:
    """A function that is interrupted at its second call, before it does anything or after."""

    def __init__(self, function: Callable[..., Any], after: bool) -> None:
        self.function, self.after, self.calls = function, after, 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == 2 and not self.after:
            raise KeyboardInterrupt
        found = self.function(*given, **named)
        if self.calls == 2:
            raise KeyboardInterrupt
        return found


Uninterrupted = Callable[[str], tuple[checked_study.CheckedStudy, dict[str, Any]]]
INTERRUPTED = {
    "random": searching({"sampler": "random", "trials": 3}, study={"name": "search", "seeds": [0, 1]}),
    "tpe": searching({"sampler": "tpe", "trials": 3, "startup": 1}, study={"name": "search", "seeds": [0, 1]}),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """By sampler, a search that was checked, and what it finds without an interruption; done when first asked for."""

    @cache
    def found(sampler: str) -> tuple[checked_study.CheckedStudy, dict[str, Any]]:
        home = tmp_path_factory.mktemp(sampler)
        ready = checked_study.prepare_study(write(home, INTERRUPTED[sampler]))
        session.run_study(ready, home / "out")
        return ready, outcome(home / "out")

    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sampler", "event"),
    thin(
        [
            *(("random", event) for event in ("round", "drawn", "record before", "record after", "told")),
            *(("tpe", event) for event in ("record after", "round")),
        ],
        7,
    ),
)
def test_an_interrupted_search_ends_in_the_same_bits(
    sampler: str,
    event: str,
    uninterrupted: Uninterrupted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (ready, expected), folder = uninterrupted(sampler), tmp_path / "out"
    with monkeypatch.context() as patched:
        match event:
            case "round":
                patched.setattr(Lines, "round", stop_before_result())
            case "drawn":
                patched.setattr(search_runs, "do_trial", Stopped(search_runs.do_trial, after=False))
            case "told":
                stopped = Stopped(SearchQueue.tell, after=True)
                patched.setattr(SearchQueue, "tell", lambda *given: stopped(*given))
            case _:
                stopped = Stopped(search_runs.write_record, after=event.endswith("after"))
                patched.setattr(search_runs, "write_record", stopped)
        with pytest.raises(KeyboardInterrupt):
            session.run_study(ready, folder)
    assert states(folder) == (["COMPLETE", "COMPLETE"] if event == "told" else ["COMPLETE", "RUNNING"])
    with pytest.raises(InvalidInput, match="holds this study already; add --resume"):
        session.run_study(ready, folder)
    session.run_study(ready, folder, resume=True)
    assert states(folder) == ["COMPLETE"] * 3
    assert outcome(folder) == expected


def test_a_finished_search_is_not_done_again(finished: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (finished / "runs").rglob("result.json")}
    session.run_study(checked_study.prepare_study(finished / "study.toml"), finished, resume=True)
    assert {path: path.stat().st_mtime_ns for path in (finished / "runs").rglob("result.json")} == before
    assert states(finished) == ["COMPLETE"] * 3


@pytest.mark.exhaustive
def test_a_trial_that_does_not_fit_is_refused_with_its_line_and_the_search_goes_on(tmp_path: Path) -> None:
    study = searching(
        {"sampler": "grid", "trials": None, "objectives": {"utility": "maximize"}},
        data={"name": "digits", "victims": 8, "auxiliary": 16, "clients": 2},
        training={"rounds": 1, "batch_size": 256, "schedule": ["sequential", "splitfed_v3"]},
        topology=[{"name": "vanilla", "cut": "relu1"}],
        method=[{"name": "none"}, {"name": "fedavg"}],
        defense=None,
    )
    assert run(write(tmp_path, study), tmp_path / "out") == 0
    found = records(tmp_path / "out")
    assert [record["state"] for record in found.values()].count("refused") == 1
    (refused,) = [record for record in found.values() if record["state"] == "refused"]
    assert refused["parameters"] == {"training.schedule": "sequential", "method": "fedavg"}
    assert refused["reason"].startswith("method[1]: ")
    assert states(tmp_path / "out").count("FAIL") == 1
    assert refused["reason"].split("'")[0] in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampler", thin(["nsga2", "nsga3"], 2))
def test_generations_inherit_what_decides_nothing_and_keep_to_the_constraints(sampler: str, tmp_path: Path) -> None:
    study = searching({"sampler": sampler, "trials": 5, "population": 2, "constraints": ["bytes <= 100000"]})
    do(study, tmp_path)
    with opened_by_optuna(tmp_path / "out" / "study.db") as storage:
        trials = optuna.load_study(study_name="search", storage=storage).trials
    assert all(set(trial.params) == set(trials[0].params) for trial in trials)
    assert len({trial.params["training.optimizer.lr"] for trial in trials[:2]}) == 2
    for trial, record in zip(trials, records(tmp_path / "out").values(), strict=True):
        assert set(record["parameters"]) <= set(trial.params)
        assert list(trial.constraints.values()) == list(record["violations"].values())
        assert record["feasible"] == (record["metrics"]["bytes"]["mean"] <= 100_000)
    assert any(("nsga" in key and ":" in key) or "generation" in key for key in trials[-1].system_attrs)


def test_hopeless_runs_end_early_and_say_so(tmp_path: Path) -> None:
    study = searching(
        {"trials": 3, "objectives": {"utility": "maximize"}, "prune": {"percentile": 99.0, "startup": 1}},
        training={"rounds": 2, "batch_size": 64, "optimizer": {"name": "SGD", "lr": {"choice": [0.5, 1e-6]}}},
        defense=None,
    )
    study["search"] |= {"sampler": "grid"}
    study["search"].pop("trials")
    study["topology"] = [{"name": "vanilla", "cut": "relu1"}]
    do(study, tmp_path)
    good, bad = records(tmp_path / "out").values()
    assert good["state"] == "complete"
    assert bad["state"] == "pruned"
    assert "pruned after round 1: utility " in bad["reason"]
    assert states(tmp_path / "out") == ["COMPLETE", "PRUNED"]
    assert [at for at, _ in bad["curve"]] == [1]
    assert [at for at, _ in good["curve"]] == [1, 2]


@pytest.mark.exhaustive
def test_folders_share_a_storage_and_no_trial_is_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIALS", f"sqlite:///{tmp_path / 'shared.db'}")
    study = searching({"storage": "$TRIALS", "trials": 3}, topology=[{"name": "vanilla", "cut": "relu1"}])
    with SearchSession(study, tmp_path / "a") as a, SearchSession(study, tmp_path / "b") as b:
        first, second = a.ask(), b.ask()
        assert first is not None
        assert second is not None
        assert [first.number, second.number] == [0, 1]
        b.run(second)
        # Who died holding a trial is known by its folder: another one leaves it alone.
        third = b.ask()
        assert third is not None
        assert third.number == 2
        b.run(third)
        assert b.ask() is None
    with SearchSession(study, tmp_path / "a") as a:
        again = a.ask()
        assert again is not None
        assert again.number == 0
        assert again.parameters == first.parameters
        a.run(again)
        assert a.ask() is None
        assert sorted(r["trial"] for r in a.outcome.records) == [0, 1, 2]
    assert sorted(p.name for p in (tmp_path / "a" / "trials").iterdir()) == ["00000.json", "00001.json", "00002.json"]
    other = copy.deepcopy(study)
    other["search"]["objectives"] = {"utility": "maximize", "bytes": "minimize"}
    with pytest.raises(InvalidInput, match="storage holds another search called 'search'"):
        SearchSession(other, tmp_path / "c").__enter__()
    monkeypatch.delenv("TRIALS")
    with pytest.raises(InvalidInput, match="names the environment variable TRIALS, which is not set"):
        SearchSession(study, tmp_path / "d").__enter__()
    study["search"]["storage"] = "nosuch://host/name"
    with pytest.raises(InvalidInput, match=r"search\.storage cannot be opened: "):
        SearchSession(study, tmp_path / "e").__enter__()


def test_python_asks_and_tells(tmp_path: Path) -> None:
    study = searching({"trials": 3, "sampler": "tpe", "constraints": ["epsilon <= 3"]})
    with SearchSession(study, tmp_path / "out") as search:
        trial = search.ask()
        assert trial is not None
        assert trial.study["training"]["optimizer"]["lr"] == trial.parameters["training.optimizer.lr"]
        for metrics, line in (
            ({"utility_validation": 0.5, "bytes": 3.0, "epsilon": 2.0, "psnr": 1.0}, "unknown metric 'psnr'"),
            ({"utility_validation": 0.5, "bytes": 3.0}, "metric 'epsilon' is missing"),
            (
                {"utility_validation": float("nan"), "bytes": 3.0, "epsilon": 2.0},
                "utility_validation=nan is not allowed",
            ),
            (None, "expected the metrics of the trial, or failed="),
        ):
            with pytest.raises(InvalidInput, match=line):
                search.tell(trial, metrics)
        record = search.tell(trial, {"utility_validation": 0.5, "bytes": 3.0, "epsilon": 2.0})
        assert record["feasible"]
        with pytest.raises(InvalidInput, match="trial 0 has been told already"):
            search.tell(trial, failed="twice")
        second = search.ask()
        assert second is not None
        found = search.tell(second, {"utility_validation": 0.9, "bytes": 1.0, "epsilon": float("inf")})
        assert not found["feasible"]
        assert found["metrics"]["epsilon"]["mean"] is None
        third = search.ask()
        assert third is not None
        search.tell(third, failed="the machine was needed")
        assert search.ask() is None
        assert search.outcome.front == (0,)
    assert states(tmp_path / "out") == ["COMPLETE", "COMPLETE", "FAIL"]
    with pytest.raises(InvalidInput, match=r"no table \[search\]"):
        SearchSession({"study": {"name": "a"}}, tmp_path)


@pytest.mark.exhaustive
def test_the_plan_tells_how_many_runs_and_for_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = attacked()
    study["defense"][1] = {"name": "gaussian_release", "epsilon": {"low": 1.0, "high": 5.0}}
    path = write(tmp_path, study)
    assert main(["plan", str(path), "--schedules", "sequential", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["search"]
    assert (plan["trials"], plan["runs"], plan["constraints"]) == (3, 9, ["rmle.psnr <= 7.9"])
    assert plan["seconds"] > 0
    assert plan["price"].startswith("the epsilon of a trial is about that trial alone: to choose among trials")
    assert main(["plan", str(path), "--schedules", "sequential"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("search by random: 3 trials, 9 runs, about ")
    assert "to choose among trials on the same rows has a price" in said
