"""A report tells what an attack chose, whether more work would recover more, and where a bound did not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitfed.attacks.selection import Attempt, Selection
from splitfed.study.report.document import summarise, write_report
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
    told = setting["attacks"]["inverse_network(budget=fast)"]["selection"]
    assert told == {
        "members": ["inverse_network, width 8"],
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


def test_other_attacks_have_no_such_section(tmp_path: Path) -> None:
    put(tmp_path, result("none", 0, 0.0, 0.9, {"psnr": 20.0}), (1, 8, 8), 0)
    assert '<section id="budget">' not in write_report(tmp_path).read_text("utf-8")


@pytest.mark.parametrize(("least", "beaten"), [(0.05, True), (0.02, False), (None, False)])
def test_an_attack_below_the_bound_of_gaussian_rows_is_said(tmp_path: Path, least: float | None, beaten: bool) -> None:
    found = result("none", 0, 0.0, 0.9, {"psnr": 20.0, "mse": 0.04})
    found["information"] = {"least_mse": least, "assumed": "rows that are Gaussian", "why": ""}
    put(tmp_path, found, (1, 8, 8), 0)
    page = write_report(tmp_path).read_text("utf-8")
    assert ("an attack of this study is below the least MSE of Gaussian rows" in page) is beaten
