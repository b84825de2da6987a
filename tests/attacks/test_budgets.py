"""Presets of attacks: which is meant where none is named, and that a quick look is called one wherever it is shown."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.training_time.sdar import Sdar
from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.registry import TABLES, load
from splitfed.study.report.summary import summarise
from splitfed.threats import training_time
from tests.attacks.examples import lenet_run
from tests.study.examples import small, write


@pytest.mark.parametrize("name", TABLES["attacks"])
def test_an_attack_made_without_a_word_is_a_budget(name: str) -> None:
    kind = load("attacks", name)
    given = {"attribute": "odd"} if name == "attribute" else {}
    assert kind.with_budget(**given) == kind.with_budget(kind.usual(), **given)
    # Those that live in training have defaults of their own.
    assert issubclass(kind, TrainingAttack) or kind(**given) == kind.with_budget(**given)
    assert {"quick", "full"} <= set(kind.budgets) <= {"quick", "standard", "full"}
    # A budget of its own, or none.
    assert kind.budgets.get("standard") not in (kind.budgets["quick"], kind.budgets["full"])


def test_nine_attacks_have_a_standard_budget_that_is_more_than_a_quick_look() -> None:
    assert {name for name in TABLES["attacks"] if load("attacks", name).usual() == "standard"} == {
        "dip", "inverse_network", "latent_search", "lbfgs_inversion", "query_inversion", "rmle", "strongest",
        "strongest_labels", "strongest_membership",
    }  # fmt: skip
    assert InverseNetwork.with_budget().epochs > InverseNetwork.with_budget("quick").epochs
    assert Rmle.with_budget().iterations > Rmle.with_budget("quick").iterations


def test_what_is_a_quick_look() -> None:
    assert Rmle.with_budget("quick").quick
    assert not Rmle.with_budget().quick
    assert not Rmle.with_budget("quick", iterations=301).quick
    assert Rmle.with_budget("quick", smoothness=0.3).quick, "no part of the budget"
    assert not Norm.with_budget("quick").quick, "the authors' own settings"
    assert training_time.resolve_attack("sdar") == Sdar.with_budget("quick")


@pytest.mark.parametrize(("budget", "quick"), [("quick", True), ("full", False), (None, False)])
def test_a_result_says_that_it_is_a_quick_look(
    budget: str | None, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = {name: {**budget, "epochs": i + 1} for i, (name, budget) in enumerate(InverseNetwork.budgets.items())}
    monkeypatch.setattr(InverseNetwork, "budgets", budgets)
    (result,) = lenet_run().attack("inverse_network", budget=budget)
    assert result.quick is quick


def test_an_unknown_budget_is_told_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="unknown budget of InverseNetwork 'standrad'; did you mean 'standard'"):
        lenet_run().attack("inverse_network", budget="standrad")


@pytest.mark.parametrize("budget", ["quick", "no-such-budget"])
def test_a_budget_beside_an_attack_that_is_no_name_is_refused(budget: str) -> None:
    run, said = (
        lenet_run(),
        rf"budget='{budget}' applies to attacks given by name; construct this attack as Rmle.with_budget\('",
    )
    with pytest.raises(InvalidInput, match=said):
        run.attack(["inverse_network", Rmle()], budget=budget)
    with pytest.raises(InvalidInput, match=said):
        run.plan_attack(Rmle(), budget=budget)


def test_no_attack_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"attacks=\[\] is empty; expected at least one attack"):
        lenet_run().attack([])


@pytest.mark.exhaustive
def test_a_study_a_report_and_the_command_line_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick, usual = ({"name": "rmle", "budget": p, "iterations": 3} for p in ("quick", "standard"))
    study = small(attack=[quick, usual], defense=[{"name": "none"}])
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("quick look") == 1, "in the head of the one attack's column"
    (home,) = (tmp_path / "out" / "runs").iterdir()
    entries = json.loads((home / "result.json").read_text("utf-8"))["attacks"]
    assert {entry["label"]: entry["quick"] for entry in entries} == {
        "rmle(budget=quick, iterations=3)": True, "rmle(budget=standard, iterations=3)": False
    }  # fmt: skip
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert page.count('<span class="small">quick look</span>') == 1
    said = "A quick look (budget quick), where more work may find more: rmle(budget=quick)."
    assert said in page
    assert said in summarise(tmp_path / "out")["headline"]
    with (tmp_path / "out" / "results.csv").open(encoding="utf-8") as file:
        assert {row["attack"] for row in csv.DictReader(file)} == {entry["attack"] for entry in entries}
    for budget, told in (("quick", True), ("standard", False)):
        assert main(["attack", str(home), "--attack", "rmle", "--budget", budget]) == 0
        assert (capsys.readouterr().out.splitlines()[0].endswith("(quick look)")) is told


def test_help_says_what_quick_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", "--help"]) == 0
    assert "quick (a quick look)" in " ".join(capsys.readouterr().out.split())
