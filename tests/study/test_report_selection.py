"""A report tells what an attack chose, whether more work would recover more, and where a bound did not hold."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitfed.attacks.selection import Attempt, LeftOut, Selection
from splitfed.study.report.document import write_report
from splitfed.study.report.figures.budget import _attempts
from splitfed.study.report.summary import summarise
from splitfed.study.results import AttackRecord, RunResult
from tests.study.test_report import parsed, put, result


def selection(*, converged: bool) -> dict[str, Any]:
    """A member whose last doubling gains a hundredth of a dB, or 3 dB."""
    after = 0.0399 if converged else 0.02
    tried = (Attempt("linear_inverse", 0, 0.1, 0.05), Attempt("inverse_network, width 8", 5, 1.0, 0.04))
    return Selection(
        "inverse_network, width 8", (*tried, Attempt("inverse_network, width 8", 10, 2.0, after))
    ).to_json()


def study(folder: Path, *converged: bool) -> Path:
    for seed, one in enumerate(converged):
        found = result("none", seed, 0.0, 0.9, {"psnr": 20.0})
        found["attacks"][0]["selection"] = selection(converged=one)
        put(folder, found, (1, 8, 8), seed)
    return folder


def test_what_has_not_converged_is_said(tmp_path: Path) -> None:
    folder = study(tmp_path, True, False)
    (setting,) = summarise(folder)["settings"]
    told = setting["attacks"]["inverse_network(budget=quick)"]["selection"]
    assert told == {
        "members": ["inverse_network, width 8"],
        "criterion": "on held-out rows",
        "converged": False,
        "gain": pytest.approx(3.0103, abs=1e-4),
        "unit": " dB",
    }
    page = write_report(folder).read_text("utf-8")
    parsed(page)
    assert "Not converged, so a lower bound of what leaks" in page
    assert "chosen on held-out rows: inverse_network, width 8; not converged: twice the work gained 3 dB" in page
    assert '<section id="budget">' in page


def test_what_has_converged_is_no_lower_bound(tmp_path: Path) -> None:
    page = write_report(study(tmp_path, True)).read_text("utf-8")
    assert "chosen on held-out rows: inverse_network, width 8</span>" in page
    assert "Not converged" not in page


def test_a_study_that_asked_for_no_undefended_run_is_not_told_that_none_finished(tmp_path: Path) -> None:
    put(tmp_path, result("noise", 0, 0.5, 0.9, {"psnr": 20.0}), (1, 8, 8), 0)
    said = "No undefended run has a result, so nothing can be said of what the defenses change."
    assert said in summarise(tmp_path)["headline"]


def test_other_attacks_have_no_such_section(tmp_path: Path) -> None:
    put(tmp_path, result("none", 0, 0.0, 0.9, {"psnr": 20.0}), (1, 8, 8), 0)
    assert '<section id="budget">' not in write_report(tmp_path).read_text("utf-8")


@pytest.mark.parametrize(("least", "beaten"), [(0.05, True), (0.02, False), (None, False)])
def test_an_attack_below_the_bound_of_gaussian_rows_is_said(tmp_path: Path, least: float | None, beaten: bool) -> None:
    found = result("none", 0, 0.0, 0.9, {"psnr": 20.0, "mse": 0.04})
    found["information"] = {"least_mse": least, "assumed": "rows that are Gaussian", "why": ""}
    put(tmp_path, found, (1, 8, 8), 0)
    page = write_report(tmp_path).read_text("utf-8")
    assert ("an attack or a floor of this study is below the least MSE of Gaussian rows" in page) is beaten


@pytest.mark.parametrize(("floor", "told"), [(0.03, True), (0.05, False)])
def test_a_floor_below_every_attack_is_told_beside_the_best(tmp_path: Path, floor: float, told: bool) -> None:
    """The column held the least error of the attacks alone, and the bound was held against that."""
    found = result("none", 0, 0.0, 0.9, {"psnr": 20.0, "mse": 0.04})
    found["attacks"][0]["scores"]["mse"]["nearest_10"] = {"mean": floor, "low": floor, "high": floor}
    found["information"] = {"least_mse": 0.035, "assumed": "rows that are Gaussian", "why": ""}
    put(tmp_path, found, (1, 8, 8), 0)
    page = write_report(tmp_path).read_text("utf-8")
    assert (f"a floor is lower: {floor:g}" in page) is told
    assert ("an attack or a floor of this study is below" in page) is told


def labels(folder: Path, *, judged: bool) -> Path:
    """A study in which an attack on labels was chosen among others: on known victims, or by their order."""
    found = result("none", 0, 0.0, 0.9, {"accuracy": 0.8})
    errors = (0.0, 0.3, 0.2) if judged else (math.nan,) * 3
    sizes = (("norm", 0), ("exploit", 5), ("exploit", 10))
    tried = tuple(Attempt(name, size, 0.5, e) for (name, size), e in zip(sizes, errors, strict=True))
    criterion = "on known victims" if judged else "by the stated order of members"
    told = Selection("norm", tried if judged else tried[:1], "accuracy", (LeftOut("direction", "no"),), criterion)
    found["attacks"][0]["target"] = "labels"
    found["attacks"][0]["selection"] = json.loads(json.dumps(told.to_json()).replace("NaN", "null"))
    put(folder, found, (1, 8, 8), 0)
    return folder


def test_an_accuracy_is_told_in_points_and_who_judged_it(tmp_path: Path) -> None:
    folder = labels(tmp_path, judged=True)
    (setting,) = summarise(folder)["settings"]
    (told,) = (attack["selection"] for attack in setting["attacks"].values())
    assert told == {
        "members": ["norm"],
        "criterion": "on known victims",
        "converged": False,
        "gain": pytest.approx(0.1),
        "unit": " of accuracy",
    }
    page = write_report(folder).read_text("utf-8")
    parsed(page)
    assert "chosen on known victims: norm; not converged: twice the work gained 0.1 of accuracy" in page
    assert '<section id="budget">' in page


def test_a_choice_by_order_has_no_errors_to_draw(tmp_path: Path) -> None:
    page = write_report(labels(tmp_path, judged=False)).read_text("utf-8")
    parsed(page)
    assert "chosen by the stated order of members: norm</span>" in page
    assert "Not converged" not in page


def test_an_error_of_nothing_is_drawn_where_it_is_a_share_and_not_where_it_is_in_decibels() -> None:
    def drawn(metric: str) -> list[float]:
        tried = [
            asdict(Attempt("a", 0, 1.0, 0.0)),
            asdict(Attempt("b", 0, 1.0, 0.1)),
            {**asdict(Attempt("c", 0, 1.0, 0.0)), "error": None},
        ]
        record = AttackRecord("one", "one", "server", {}, selection={"tried": tried, "metric": metric})
        setting = SimpleNamespace(runs=[RunResult("run", attacks=(record,))])
        return [attempt["error"] for attempt in _attempts(setting, "one")]  # type: ignore[arg-type]

    assert drawn("accuracy") == drawn("auc") == [0.0, 0.1]
    assert drawn("mse") == [pytest.approx(-10.0)]
