"""What a search makes of results: metrics by hand, the front, hopeless runs, what is said, and what it may reach."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import NameResolver
from splitfed.study import trust
from splitfed.study.config.schema import PruneTable
from splitfed.study.config.search_metrics import SearchConstraint, SearchMetric, SearchObjective
from splitfed.study.report.figures.search import plot_trials
from splitfed.study.report.search_data import SearchOutcome, find_front, metric_label, search_sentences
from splitfed.study.report.search_page import front_rows
from splitfed.study.results import MeasuredUtility
from splitfed.study.run import search as search_module
from splitfed.study.run.search import MissingMetric, best_so_far, find_hopeless, measure_metric

UTILITY = MeasuredUtility("accuracy", bounds=(0.0, 1.0))


@pytest.fixture(autouse=True)
def rows_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the rows of a result from the result itself."""
    monkeypatch.setattr(search_module, "table_rows", lambda one: iter(one.rows))


def found(*rows: dict[str, Any], training_attack: str | None = None) -> Any:
    told = [{"run": "r", **row} for row in rows]
    return SimpleNamespace(rows=told, utility=UTILITY, training_attack=training_attack)


def test_a_metric_is_the_mean_over_seeds_with_its_interval() -> None:
    metric = SearchMetric("utility", "utility")
    three = [found({"utility": value}) for value in (0.6, 0.7, 0.8)]
    measured = measure_metric(three, metric)
    assert measured["mean"] == pytest.approx(0.7)
    assert (measured["n"], measured["over"]) == (3, "seeds")
    assert 0.0 < measured["low"] < 0.6
    assert 0.8 < measured["high"] < 1.0
    one = measure_metric([found({"utility": 0.6, "utility_low": 0.5, "utility_high": 0.7})], metric)
    assert (one["low"], one["high"], one["over"]) == (0.5, 0.7, "rows")


def test_an_epsilon_is_the_largest_and_none_where_one_seed_has_none() -> None:
    for name in ("epsilon", "epsilon_promised"):
        metric = SearchMetric(name, name)
        assert measure_metric([found({name: 2.0}), found({name: 5.0})], metric)["mean"] == 5.0
        assert measure_metric([found({name: 2.0}), found({name: None})], metric)["mean"] is None
        assert measure_metric([found({}), found({name: 1.0})], metric)["mean"] is None


def test_hijacked_runs_count_for_their_own_attack_alone() -> None:
    results = [
        found({"utility": 0.9, "attack": "rmle", "psnr": 10.0}),
        found({"utility": 0.1, "attack": "fsha", "psnr": 20.0}, training_attack="fsha"),
    ]
    assert measure_metric(results, SearchMetric("utility", "utility"))["mean"] == 0.9
    assert measure_metric(results, SearchMetric("fsha.psnr", "psnr", "fsha"))["mean"] == 20.0
    assert measure_metric(results, SearchMetric("rmle.psnr", "psnr", "rmle"))["mean"] == 10.0


def test_a_score_on_the_wrong_side_of_chance_counts_as_on_the_right_one() -> None:
    results = [found({"attack": "norm", "auc": value}) for value in (0.1, 0.9, 0.5)]
    assert measure_metric(results, SearchMetric("auc", "auc", "norm"))["mean"] == pytest.approx((0.9 + 0.9 + 0.5) / 3)


def test_a_run_without_the_number_says_what_it_has() -> None:
    metric = SearchMetric("rmle.ssim", "ssim", "rmle")
    with pytest.raises(MissingMetric, match=r"run r has no rmle\.ssim; it has psnr"):
        measure_metric([found({"attack": "rmle", "psnr": 3.0})], metric)
    with pytest.raises(MissingMetric, match=r"run r has no rmle\.ssim"):
        measure_metric([found({"attack": "rmle", "ssim": float("nan")})], metric)
    with pytest.raises(MissingMetric, match="no run was attacked by rmle"):
        measure_metric([found({"attack": "norm", "auc": 0.6})], metric)


def test_caps_and_violations() -> None:
    metric = SearchMetric("epsilon", "epsilon")
    assert SearchObjective(metric, "minimize", 50.0).value_of(float("inf")) == 50.0
    assert SearchObjective(metric, "minimize", 50.0).value_of(3.0) == 3.0
    assert SearchObjective(metric, "maximize", 2.0).value_of(1.0) == 2.0
    most = SearchConstraint(metric, "<=", 4.0, "epsilon <= 4")
    assert [most.violation(value) for value in (2.0, 4.0, 6.0)] == [-0.5, 0.0, 0.5]
    assert most.violation(float("inf")) == 1e9
    least = SearchConstraint(metric, ">=", -2.0, "x >= -2")
    assert [least.violation(value) for value in (0.0, -2.0, -3.0)] == [-1.0, 0.0, 0.5]
    assert SearchConstraint(metric, "<=", 0.0, "x <= 0").violation(0.25) == 0.25


def record(number: int, feasible: bool = True, state: str = "complete", **values: float) -> dict[str, Any]:
    metrics = {name: {"mean": v, "low": v - 1, "high": v + 1, "n": 3, "over": "seeds"} for name, v in values.items()}
    setting = {"topology": "vanilla", "schedule": "s", "method": "none", "defense": f"noise({number})"}
    return {
        "trial": number,
        "state": state,
        "reason": None if state == "complete" else "it does not fit",
        "parameters": {},
        "setting": {**setting, "family": "noise", "variant": ""},
        "runs": [f"run{number}"],
        "metrics": metrics,
        "objectives": dict(values),
        "violations": {},
        "feasible": feasible,
        "promised": False,
        "spent": None,
        "curve": [],
    }


GOALS = {"utility": "maximize", "rmle.psnr": "minimize"}
# 1 and 2 trade, 3 is worse than 1 in both, 4 equals 2, 5 is better than all but outside, 6 and 7 have no values.
RECORDS = [
    record(1, utility=0.9, **{"rmle.psnr": 20.0}),
    record(2, utility=0.8, **{"rmle.psnr": 10.0}),
    record(3, utility=0.85, **{"rmle.psnr": 21.0}),
    record(4, utility=0.8, **{"rmle.psnr": 10.0}),
    record(5, utility=1.0, feasible=False, **{"rmle.psnr": 1.0}),
    record(6, state="refused"),
    record(7, state="pruned"),
]


def outcome(records: list[dict[str, Any]], **table: Any) -> SearchOutcome:
    search = {"sampler": "tpe", "trials": 9, "objectives": GOALS, **table}
    return SearchOutcome(search, GOALS, tuple(records), find_front(records, GOALS))


def test_the_front_by_hand() -> None:
    assert find_front(RECORDS, GOALS) == (1, 2)
    assert find_front(RECORDS, {"utility": "minimize", "rmle.psnr": "minimize"}) == (2,)
    assert find_front(RECORDS, {"utility": "maximize"}) == (1,)
    assert find_front([RECORDS[4]], GOALS) == ()


def test_what_is_said_of_a_search() -> None:
    trials = [
        {**one, "promised": one["trial"] in (1, 2, 3), "spent": {1: 2.0, 2: 3.5}.get(one["trial"])} for one in RECORDS
    ]
    said = search_sentences(outcome(trials, constraints=["rmle.psnr >= 5"]))
    assert said[0] == (
        "Search by tpe: 7 trials of 9 (1 refused, 1 pruned, 1 outside the constraints), 2 on the front "
        "(maximize utility, minimize rmle.psnr; constraints: rmle.psnr >= 5)."
    )
    assert said[1].startswith(
        "The epsilon of a trial is about that trial alone: to choose among trials on the same rows"
    )
    assert said[1].endswith("By basic composition all runs of the 2 trials with an epsilon have 5.5 together.")
    assert "test rows, which flatters what was chosen by it" in said[2]
    assert len(search_sentences(outcome(RECORDS))) == 2


@pytest.mark.drawn
def test_the_table_and_the_figure_of_the_front() -> None:
    rows = front_rows(outcome(RECORDS))
    assert [(row["trial"], row["setting"], row["runs"]) for row in rows] == [
        (1, "noise(1)", ["run1"]),
        (2, "noise(2)", ["run2"]),
    ]
    assert rows[0]["metrics"] == [("0.9", "-0.1 to 1.9"), ("20", "19 to 21")]
    drawn = plot_trials(outcome(RECORDS), "search")
    assert "PSNR [dB] of rmle: less is better" in drawn
    assert "outside the constraints" in drawn
    assert drawn == plot_trials(outcome(RECORDS), "search")
    assert plot_trials(outcome([RECORDS[5]]), "search") == ""
    alone = SearchOutcome({"objectives": {"utility": "maximize"}}, {"utility": "maximize"}, tuple(RECORDS[:3]), (1,))
    assert ">trial</text>" in plot_trials(alone, "search")
    assert metric_label("rmle.tpr_at_fpr_0.1%") == "TPR at FPR 0.1 % of rmle"


def test_which_runs_are_hopeless() -> None:
    rule = PruneTable(percentile=25.0, startup=4, warmup=2)
    others = [[(1, 0.1), (2, value)] for value in (0.4, 0.5, 0.6, 0.7)]
    assert find_hopeless(rule, [(1, 0.0)], others, True) is None  # before the warm-up
    assert find_hopeless(rule, [(1, 0.0), (2, 0.3)], others[:3], True) is None  # too few
    reason = find_hopeless(rule, [(1, 0.0), (2, 0.3)], others, True)
    assert reason == "pruned after round 2: utility 0.3 is in the lowest 25 % of 4 trials"
    assert find_hopeless(rule, [(2, 0.45)], others, True) is not None  # one of four is worse
    assert find_hopeless(rule, [(2, 0.55)], others, True) is None
    # Of a loss, the greatest are the worst.
    assert find_hopeless(rule, [(2, 0.3)], others, False) is None
    assert find_hopeless(rule, [(2, 0.9)], others, False) is not None


def test_curves_hold_the_best_so_far() -> None:
    history = [{"round": i, "validation": {"union": v}} for i, v in enumerate((0.2, None, 0.1, 0.4))]
    assert best_so_far(history, True) == [(1, 0.2), (3, 0.2), (4, 0.4)]
    assert best_so_far(history, False) == [(1, 0.2), (3, 0.1), (4, 0.1)]


@pytest.mark.parametrize(
    ("study", "what"),
    [
        ({"model": {"name": {"choice": ["mlp", "evil.py:model"]}}}, "import 'evil.py:model'"),
        ({"defense": [{"choice": [{"name": "none"}, {"name": "evil:D"}]}]}, "import 'evil:D'"),
        ({"training": {"schedule": {"choice": ["sequential", "evil:S"]}}}, "import 'evil:S'"),
        ({"topology": [{"name": "vertical", "top": {"choice": [{"model": "evil:M"}]}}]}, "import 'evil:M'"),
        ({"defense": [{"choice": [{"name": "none"}], "name": "evil:D"}]}, "import 'evil:D'"),
        ({"search": {"storage": "mysql://host/name"}}, "connect to 'mysql://host/name'"),
    ],
)
def test_a_search_of_somebody_else_reaches_nothing_without_trust(
    study: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=what):
        trust.code_of(tmp_path, study, trust=False)
    assert isinstance(trust.code_of(tmp_path, study, trust=True), NameResolver)
