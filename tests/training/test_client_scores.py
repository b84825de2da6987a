"""How far clients lie apart and when a target is reached: worked out by hand, in runs, tables and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import splitfed
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.models.mlp import mlp
from splitfed.study.report.data import Setting, read_study
from splitfed.study.report.figures.rounds import utility_by_round
from splitfed.study.report.summary import summarise
from splitfed.study.results import RunResult
from splitfed.topologies import local
from splitfed.training.client_scores import find_best_round, find_first_reaching, summarize_clients
from tests.blank_figures import PICTURES
from tests.study.examples import checked, small, write


def test_spread_by_hand() -> None:
    # Mean .6; squared distances .16, .04, .04 and .16 of four clients: variance .1.
    found = summarize_clients([0.2, 0.8, None, 0.4, 1.0])
    assert found is not None
    assert found == pytest.approx({"mean": 0.6, "min": 0.2, "max": 1.0, "std": 0.1**0.5, "worst_decile": 0.2})
    # Of eleven clients the worst tenth is two.
    assert summarize_clients([i / 10 for i in range(11)])["worst_decile"] == pytest.approx(0.05)  # type: ignore[index]
    assert summarize_clients([1.0, 3.0], higher_is_better=False)["worst_decile"] == 3.0  # type: ignore[index]
    assert summarize_clients([None, None]) is None


def test_a_target_is_reached_on_validation_rows_alone() -> None:
    history: list[dict[str, Any]] = [
        {"round": 0, "validation": {"union": 0.5}, "test": {"union": 0.99}},
        {"round": 1},
        {"round": 2, "validation": {"union": None}, "test": {"union": 0.99}},
        {"round": 3, "validation": {"union": 0.8}, "test": {"union": 0.1}},
        {"round": 4, "validation": {"union": 0.9}, "test": {"union": 0.1}},
    ]
    assert find_first_reaching(history, 0.8) is history[3]
    assert find_first_reaching(history, 0.95) is None
    assert find_first_reaching(history, 0.6, higher_is_better=False) is history[0]


def test_the_round_is_chosen_by_validation_rows() -> None:
    def entry(number: int, validation: float | None, test: float) -> dict[str, Any]:
        return {"round": number, "validation": {"union": validation}, "test": {"union": test}}

    history = [entry(0, 0.5, 0.9), entry(1, 0.8, 0.6), entry(2, 0.8, 0.7), entry(3, None, 1.0), {"round": 4}]
    assert find_best_round(history) is history[1]
    assert find_best_round(history, higher_is_better=False) is history[0]
    assert find_best_round(history[3:]) is None


def test_a_run_tells_both() -> None:
    data = splitfed.data.digits().clients(3, dirichlet=0.5, auxiliary=0, victims=1)
    run = splitfed.train(local(mlp((1, 8, 8), 10, (12,))), data, schedule="splitfed_v1", rounds=4)
    for part in ("validation", "test"):
        last = run.history[-1][part]
        assert last["spread"] == summarize_clients(last["clients"])
        assert last["spread"]["min"] < last["union"] < last["spread"]["max"]
    curve = [entry["validation"]["union"] for entry in run.history]
    assert run.rounds_to(curve[1]) == 1 + next(i for i, score in enumerate(curve) if score >= curve[1])
    assert run.rounds_to(1.1) is None
    alone = splitfed.data.digits().clients(1, auxiliary=0, victims=1)
    assert "spread" not in splitfed.train(local(mlp((1, 8, 8), 10, (12,))), alone, rounds=1).history[-1]["test"]


STUDY: dict[str, Any] = {
    "study": {"name": "told", "seeds": [0, 1], "target": 0.3},
    "data": {"name": "digits", "victims": 8, "auxiliary": 32, "clients": 3, "dirichlet": 0.5},
    "training": {"rounds": 4, "batch_size": 64, "schedule": "independent", "across": True},
    "topology": [{"name": "local", "cuts": ["relu1"]}],
    "method": [{"name": "fedproto"}, {"name": "none"}],
    "defense": [{"name": "none"}],
    "attack": None,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("records")
    with PICTURES.shown():
        assert main(["run", str(write(home, small(**STUDY))), "--folder", str(home / "out")]) == 0
    return home / "out"


@pytest.mark.exhaustive
def test_results_hold_what_the_history_says(finished: Path) -> None:
    table = pd.read_csv(finished / "results.csv").set_index("run")
    for path in (finished / "runs").glob("*/result.json"):
        found = json.loads(path.read_text("utf-8"))
        last, row = found["history"][-1]["test"], table.loc[path.parent.name]
        assert found["utility"]["spread"] == summarize_clients(last["clients"])
        assert row["client_worst_decile"] == row["client_min"] == min(last["clients"])
        chosen = find_best_round(found["history"])
        assert chosen is not None
        assert row["selected_round"] == chosen["round"] + 1
        assert row["selected_utility"] == chosen["test"]["union"]
        for name, scores in last["across"].items():
            assert row[f"across_{name}"] == pytest.approx(sum(scores) / 3)
        assert last["across"]["own"] == pytest.approx(last["clients"])
        first = find_first_reaching(found["history"], 0.3)
        assert (found["target"]["rounds"] is None) == (first is None)
        if first is not None:
            assert found["target"] == {
                "value": 0.3,
                "rounds": first["round"] + 1,
                "bytes": first["bytes"],
                "simulated_seconds": None,
            }
            assert row["rounds_to_target"] == first["round"] + 1
        if found["method"] != "none":
            assert row["method_nearest_prototype"] == pytest.approx(sum(last["method"]["nearest_prototype"]) / 3)
            assert row["bytes_prototype"] == found["bytes_by_kind"]["prototype"]


def test_the_report_shows_every_client_and_the_target(finished: Path) -> None:
    page = (finished / "report.html").read_text("utf-8")
    section = page[page.index('<section id="clients">') :]
    section = section[: section.index("</section>")]
    assert section.count("<svg") == 2
    text = re.sub(r"<[^>]+>", " ", section)
    for words in ("no method", "fedproto", "worst tenth", "nearest prototype", "rounds to 0.3", "forward transfer"):
        assert words in text, words
    assert '<section id="prototypes">' in page
    assert page.count("large marks: global prototypes (t-SNE)</text>") == 1
    none, proto = summarise(finished)["settings"]
    assert [none["method"], proto["method"]] == ["no method", "fedproto(weight=1)"]
    scores = [(run.utility.spread or {})["std"] for run in read_study(finished).settings[0].runs]
    assert none["clients"]["spread"]["std"]["mean"] == pytest.approx(sum(scores) / 2)
    assert none["clients"]["method"] == {}
    assert set(proto["clients"]["method"]) == {"nearest_prototype", "nearest_own_prototype"}
    assert none["target"]["of"] == 2
    headline = summarise(finished)["headline"]
    assert any(said.startswith("fedproto: accuracy ") and "without the method" in said for said in headline)
    assert headline.count("No attack was scored, so nothing can be said about leakage.") == 1


def test_rounds_that_not_every_seed_scored_are_left_out() -> None:
    def run(*scored: int) -> RunResult:
        return RunResult("run", history=tuple({"round": r, "validation": {"union": r / 10}} for r in scored))

    found = utility_by_round(Setting("t", "none", "none", 0.0, "", (run(0, 1, 3), run(1, 3))))
    assert {r: e.mean for r, e in found.items()} == pytest.approx({2: 0.1, 4: 0.3})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"study": {"name": "s", "target": 95.0}}, r"study\.target: target \(an accuracy\)=95\.0 is not allowed"),
        ({"study": {"name": "s", "target": "high"}}, r"study\.target: 'high' is not allowed; expected a number"),
        (
            {"study": {"name": "s", "target": 0.5}, "data": {**STUDY["data"], "validation": 0.0}},
            r"study\.target: target is measured on validation rows, and no client has one",
        ),
        (
            {"defense": [{"name": "label_dp"}]},
            r"training\.across: across=True puts everybody's rows through everybody's segments",
        ),
    ],
)
def test_a_target_that_cannot_be_told_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked(small(**{**STUDY, **changes}))
    (line,) = str(caught.value).splitlines()
    assert re.match(rf"study\.toml: {text}", line), line


def test_the_spread_of_scores_beyond_all_squares_is_finite() -> None:
    found = summarize_clients([1.0, -1e300])
    assert found is not None
    assert (found["min"], found["max"], found["worst_decile"]) == (-1e300, 1.0, -1e300)
    assert found["mean"] == pytest.approx(-5e299)
    assert found["std"] == pytest.approx(5e299)
