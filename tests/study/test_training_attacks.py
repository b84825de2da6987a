"""Training attacks in a study: passive ones share the honest training, an active one has a training of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file

from splitfed.attacks.base import Attack
from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.registry import TABLES, load
from splitfed.study.config.mistakes import InvalidStudy
from splitfed.study.report.summary import summarise
from splitfed.study.results import to_json
from splitfed.study.run import checked_study, session
from splitfed.study.run.checked_study import check_study
from splitfed.study.run.progress import Lines
from splitfed.study.run.runner import run_cell
from splitfed.topologies import vanilla
from splitfed.training.entry_point import train
from splitfed.training.settings import Adversaries
from tests.attacks.training_time_examples import ALL, Spy, go, ramps, small
from tests.study.examples import checked, placed, small as small_study, write

SDAR: dict[str, Any] = {"name": "sdar", "width": 8, "every": 2}
FSHA: dict[str, Any] = {"name": "fsha", "width": 8, "every": 1}
PCAT: dict[str, Any] = {"name": "pcat", "width": 8, "start": 1, "inverse_steps": 5, "refine": 1}
RMLE: dict[str, Any] = {"name": "rmle", "budget": "quick", "iterations": 5}
HONEST, HIJACKED = "vanilla-relu1--none--seed0", "vanilla-relu1--none--fsha-inside--seed0"


def study(*attacks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The small study without defenses, with these attacks."""
    training = {"rounds": 3, "batch_size": 256}
    return small_study(**{"defense": [{"name": "none"}], "attack": list(attacks), "training": training, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("inside")
    assert main(["run", str(write(home, study(SDAR, FSHA, RMLE))), "--folder", str(home / "out")]) == 0
    return home / "out"


def result(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / run / "result.json").read_text("utf-8"))
    return found


def test_what_changes_the_training_says_so() -> None:
    kinds: dict[str, type[Attack]] = {name: load("attacks", name) for name in TABLES["attacks"]}
    inside = {name: kind for name, kind in kinds.items() if issubclass(kind, TrainingAttack)}
    assert {name for name, kind in inside.items() if kind.active} == {"fsha"}
    for name, kind in inside.items():
        run = go(ALL[name])
        insider = run.engine.training_attacks["server"]
        assert getattr(insider, "active", None) is kind.active, name


def test_a_passive_training_attack_joins_every_run_and_an_active_one_has_its_own() -> None:
    grid = checked(study(SDAR, FSHA, RMLE, defense=[{"name": "none"}, {"name": "noise", "scale": 0.5}]))
    asked = {cell.id: [probe.key for probe in cell.attacks] for cell in grid.cells}
    assert asked == {
        HONEST: ["sdar", "rmle"],
        HIJACKED: ["fsha"],
        "vanilla-relu1--noise-0.5--seed0": ["sdar", "rmle"],
        "vanilla-relu1--noise-0.5--fsha-inside--seed0": ["fsha"],
    }


def test_every_run_is_a_study_of_its_own() -> None:
    for cell in checked(study(SDAR, FSHA, RMLE)).cells:
        (again,) = check_study(dict(cell.config), "config.toml", Path())[0].cells
        assert [(p.label, p.every, p.lives) for p in again.attacks] == [
            (p.label, p.every, p.lives) for p in cell.attacks
        ]
        assert (again.training_attack is None) == (cell.training_attack is None)


def test_without_honest_runs_ordinary_attacks_are_asked_of_hijacked_ones() -> None:
    grid = checked(study(FSHA, RMLE, study={"name": "small", "seeds": [0, 1], "honest": False}))
    assert [[probe.key for probe in cell.attacks] for cell in grid.cells] == [["fsha", "rmle"]] * 2


@pytest.mark.exhaustive
def test_honest_runs_are_those_without_any_training_attack(finished: Path, tmp_path: Path) -> None:
    """Same utility to the last bit, and the same bytes; a hijacked client learns something else."""
    assert main(["run", str(write(tmp_path, study(RMLE))), "--folder", str(tmp_path / "out")]) == 0
    alone, beside, hijacked = result(tmp_path / "out", HONEST), result(finished, HONEST), result(finished, HIJACKED)
    assert alone["utility"] == beside["utility"]
    assert alone["bytes"] == beside["bytes"] == hijacked["bytes"]
    assert hijacked["utility"]["test"] != beside["utility"]["test"]
    assert (alone["training_attack"], beside["training_attack"]) == (None, None)
    assert hijacked["training_attack"] == "fsha(budget=quick, width=8)"


def test_the_curve_is_in_metrics_and_result_and_ends_in_the_final_score(finished: Path) -> None:
    for run, rounds in ((HONEST, [1, 2]), (HIJACKED, [0, 1, 2])):
        found = result(finished, run)
        lines = (finished / "runs" / run / "metrics.jsonl").read_text("utf-8").splitlines()
        kept = [json.loads(line).get("training_attack_scores") for line in lines]
        assert kept == [h.get("training_attack_scores") for h in found["history"]]
        asked = {
            h["round"]: h["training_attack_scores"]["server"]["mse"]
            for h in found["history"]
            if "training_attack_scores" in h
        }
        assert list(asked) == rounds
        final = found["attacks"][0]["scores"]["mse"]
        assert asked[2]["attack"] == pytest.approx(final["attack"]["mean"], rel=1e-6)
        assert all(mse["mean_image"] == pytest.approx(final["mean_image"]["mean"]) for mse in asked.values())


def test_report_and_table_tell_trainings_apart(finished: Path) -> None:
    page = (finished / "report.html").read_text("utf-8")
    assert '<section id="learning">' in page
    assert "fsha is active: it replaces the gradients that clients get, so it has trainings of its own" in page
    assert "accuracy is that of hijacked clients, and cannot be compared with honest ones" in page
    summary = summarise(finished)
    assert [(s["place"], list(s["attacks"])) for s in summary["settings"]] == [
        ("vanilla(cut=relu1)", ["sdar(budget=quick, width=8)", "rmle(budget=quick, iterations=5)"]),
        ("vanilla(cut=relu1), fsha(budget=quick, width=8) inside", ["fsha(budget=quick, width=8)"]),
    ]
    assert summary["names"][summary["places"][1]] == "vanilla, fsha inside"
    (hijacked,) = (s for s in summary["settings"] if s["training_attack"])
    assert hijacked["attacks"]["fsha(budget=quick, width=8)"]["front"] == []
    table = pd.read_csv(finished / "results.csv")
    assert dict(zip(table["attack"], table["training_attack"].fillna(""), strict=True)) == {
        "sdar": "",
        "rmle": "",
        "fsha": "fsha(budget=quick, width=8)",
    }


class Stop(Exception):
    """Stands for a crash."""


class Crash(Lines):
    """A watcher under whose eyes the first run stops after its first round."""

    def round(self, done: int, total: int) -> None:
        if done == 1:
            raise Stop


@pytest.mark.exhaustive
def test_a_resumed_study_ends_in_the_same_guesses(finished: Path, tmp_path: Path) -> None:
    ready = checked_study.prepare_study(write(tmp_path, study(SDAR, FSHA, RMLE)))
    for cell in ready.grid.cells:
        folder = tmp_path / "runs" / cell.id
        with pytest.raises(Stop):
            run_cell(cell, ready.data, folder, Crash(1))
        again, whole = to_json(run_cell(cell, ready.data, folder, Lines(1))), result(finished, cell.id)
        told, wanted = ([h.get("training_attack_scores") for h in r["history"]] for r in (again, whole))
        assert told == wanted
        assert again["utility"] == whole["utility"]
        for probe in cell.attacks:
            file = f"attacks/{probe.key}.safetensors"
            one, two = (load_file(place / file)["prediction"] for place in (folder, finished / "runs" / cell.id))
            assert (one == two).all()


@pytest.mark.exhaustive
def test_a_finished_run_can_be_asked_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest, hijacked = (str(finished / "runs" / run) for run in (HONEST, HIJACKED))
    assert main(["attack", honest, "--attack", "inverse_network", "--budget", "quick"]) == 0
    assert main(["attack", hijacked, "--attack", "rmle", "--budget", "quick"]) == 0
    assert [a["attack"] for a in result(finished, HIJACKED)["attacks"]] == ["fsha", "rmle"]
    (cell,) = check_study(
        session.schema.read_toml(finished / "runs" / HIJACKED / "config.toml"), "config.toml", Path()
    )[0].cells
    assert [probe.key for probe in cell.attacks] == ["fsha", "rmle"]
    assert main(["attack", hijacked, "--attack", "rmle,sdar"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "attack: sdar: sdar lives in training, and was not in this one with these parameters"
    assert main(["report", str(finished)]) == 0


@pytest.mark.parametrize(
    ("attacks", "changes", "line"),
    [
        (
            [SDAR, PCAT],
            {},
            "attack[1]: pcat: sdar and pcat are both at 'server'; expected one training attack a party: give each its "
            "own study",
        ),
        ([{**SDAR, "adversary": "client0"}], {}, "attack[0]: sdar by client0: Sdar works at a party that others send"),
        ([{**RMLE, "every": 2}], {}, "attack[0].every: is for attacks that live in training; rmle is run once, after"),
        ([{**SDAR, "every": 0}], {}, "attack[0].every: every=0 is not allowed; expected"),
        (
            [RMLE],
            {"study": {"name": "small", "honest": False}},
            "study.honest: false leaves no run: no attack is an active training attack",
        ),
        (
            [FSHA, SDAR],
            {"study": {"name": "small", "honest": False}},
            "attack[1]: sdar lives in honest trainings, which study.honest = false leaves out",
        ),
        (
            [SDAR],
            {"data": {"name": "digits", "victims": 0, "auxiliary": 32}},
            "attack[0]: there are no victims to attack",
        ),
    ],
)
def test_refused_before_training(attacks: list[dict[str, Any]], changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidStudy) as error:
        checked(study(*attacks, **changes))
    (said,) = error.value.lines
    assert said.startswith(f"study.toml: {line}")


def test_two_training_attacks_at_two_parties_share_a_training() -> None:
    given = placed("multi_hop", cuts=["relu1", "relu2"])
    grid = checked({**given, "attack": [{**SDAR, "adversary": "relay"}, {**PCAT, "adversary": "server"}]})
    assert {len(cell.attacks) for cell in grid.cells} == {2}


def test_what_two_parties_find_with_one_attack_is_told_apart() -> None:
    """A report groups by labels: under one, two adversaries would count as two seeds."""
    given = placed("multi_hop", cuts=["relu1", "relu2"])
    both = [{**attack, "adversary": party} for attack in (RMLE, FSHA) for party in ("relay", "server")]
    cells = checked({**given, "attack": both}).cells
    assert len({probe.label for cell in cells for probe in cell.attacks}) == 4
    assert len({cell.training_attack.label for cell in cells if cell.training_attack}) == 2
    assert "adversary=relay" in cells[0].attacks[0].label


def test_two_hijackers_have_a_training_each() -> None:
    grid = checked(study(FSHA, {**FSHA, "width": 4}))
    assert [cell.training_attack and cell.training_attack.key for cell in grid.cells] == [None, "fsha", "fsha-2"]


def test_being_asked_teaches_nothing() -> None:
    one, two = (go(ALL["pcat"], rounds=2, adversaries=Adversaries(evaluate_every=ask)) for ask in ({"server": 1}, {}))
    assert [set(h) - {"training_attack_scores"} for h in one.history] == [set(h) for h in two.history]
    for told, silent in zip(one.history, two.history, strict=True):
        assert told["loss"] == silent["loss"]
        assert told["training_attacks"] == silent["training_attacks"]


def test_an_answer_that_cannot_be_scored_is_told() -> None:
    run = go(Spy(), adversaries=Adversaries(evaluate_every={"server": 1}))
    assert (
        "truth has shape (64, 16) and prediction (64, 2)"
        in run.history[0]["training_attack_scores"]["server"]["refused"]
    )


@pytest.mark.parametrize(
    ("ask", "victims", "text"),
    [
        ({"serfer": 1}, 64, "unknown party with a training attack 'serfer'; did you mean 'server'?"),
        ({"client0": 1}, 64, "unknown party with a training attack 'client0'"),
        ({"server": 0}, 64, r"evaluate_every\['server'\]=0 is not allowed; expected a whole number of at least 1"),
        ({"server": 1}, 0, "there are no victims to evaluate the attack at 'server' on"),
    ],
)
def test_questions_that_make_no_sense(ask: dict[str, int], victims: int, text: str) -> None:
    data = ramps(1, 64, victims)
    with pytest.raises(InvalidInput, match=text):
        train(
            vanilla(small(), "first"),
            data,
            rounds=1,
            adversaries=Adversaries(training_attacks={"server": ALL["sdar"]}, evaluate_every=ask),
        )
