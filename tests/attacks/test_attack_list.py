"""Which attacks apply to a run is told without running them, and told as the attacks themselves tell it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st

from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.registry import TABLES
from splitfed.study.config import build
from splitfed.study.config.mistakes import InvalidStudy
from splitfed.study.run.checked_study import check_study
from splitfed.study.run.preflight import build_untrained_run
from splitfed.training.run import Run
from tests.study.examples import checked, placed, small, write

LABELS: dict[str, Any] = {
    "study": {"name": "labels"},
    "data": {"name": "breast_cancer", "vertical": 2, "victims": 24},
    "training": {"rounds": 2, "schedule": "joint"},
    "topology": [
        {
            "name": "vertical",
            "bottoms": {"model": "mlp", "hidden": [8], "width": 4},
            "top": {"model": "mlp", "hidden": [8]},
            "labels": "server",
        }
    ],
    "attack": [
        {"name": "norm", "adversary": "party0_0"},
        {"name": "membership_threshold", "adversary": "server0"},
        {"name": "model_inversion", "adversary": "server0", "iterations": 5},
        {"name": "unsplit", "adversary": "server0", "rounds": 1, "restarts": 1},
        {"name": "rmle", "adversary": "server0", "iterations": 5},
    ],
}
FEDERATED = small(
    data={"name": "digits", "victims": 8, "auxiliary": 32, "clients": 2},
    training={
        "rounds": 1,
        "batch_size": 1024,
        "schedule": {"name": "splitfed_v1"},
        "record": {"parties": ["fed_server"]},
    },
    defense=[{"name": "none"}],
)


def run_of(study: dict[str, Any]) -> Run:
    grid, data = check_study(study, "study.toml", Path())
    return build_untrained_run(grid.cells[0], data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("labels")
    assert main(["run", str(write(home, LABELS)), "--folder", str(home / "out")]) == 0
    return home / "out"


def test_every_attack_has_an_answer_and_refusals_are_those_of_the_attacks() -> None:
    run = run_of({**LABELS, "attack": []})
    for party in run.engine.parties:
        found = run.evaluator.applicable(party)
        assert list(found) == list(TABLES["attacks"])
        for name, reason in found.items():
            if reason is None or name in ("dlg", "idlg", "inverting_gradients"):
                continue
            assert len(reason.splitlines()) == 1
            with pytest.raises(InvalidInput, match=f"^{re.escape(reason)}$"):
                run.attack(name, adversary=party)


@pytest.mark.parametrize(
    ("party", "name", "reason"),
    [
        ("party0_0", "norm", None),
        ("party0_0", "rmle", "Rmle needs releases; this run does not grant that"),
        ("server0", "rmle", None),
        ("server0", "norm", "party 'server0' is given the labels of 'top_out': it has none to predict"),
        (
            "server0",
            "attribute",
            "Attribute needs private attributes of the auxiliary data; this run does not grant that",
        ),
        (
            "server0",
            "dlg",
            "Dlg needs weights before and after local training; only an aggregation server gets those, in a "
            "schedule that has one, such as 'splitfed_v1'",
        ),
        (
            "server0",
            "fsha",
            "Fsha needs a training attack, train(..., adversaries=Adversaries({party: ...})); this run does "
            "not grant that",
        ),
    ],
)
def test_what_is_missing_is_named(party: str, name: str, reason: str | None) -> None:
    assert run_of({**LABELS, "attack": []}).evaluator.applicable(party)[name] == reason


def test_asking_starts_nothing_and_moves_nothing() -> None:
    run = run_of({**LABELS, "attack": []})
    modules = run.engine.modules(0, run.schedule.newest(0, run.trainer.schedule_state))
    before = {f"{n}/{k}": t.clone() for n, m in modules.items() for k, t in m.state_dict().items()}
    run.evaluator.applicable("server0")
    run.evaluator.applicable("party0_0")
    assert before
    assert all(torch.equal(before[f"{n}/{k}"], t) for n, m in modules.items() for k, t in m.state_dict().items())
    assert run.engine.traffic.bytes("train") == 0


def test_the_fed_servers_attacks_apply_where_it_is_recorded_and_updates_are_gradients() -> None:
    found = run_of(FEDERATED).evaluator.applicable(None)
    assert found["dlg"] is None
    assert found["inverse_network"] is None  # by the server, the first party without data
    assert found["direction"] == "party 'server' is given the labels of 'fc2': it has none to predict"
    several = {**FEDERATED, "training": {**FEDERATED["training"], "batch_size": 64}}
    reason = run_of(several).evaluator.applicable(None)["dlg"]
    # 1797 - 8 - 32 rows for two clients, of which 7 in 10 train: 616 in ten batches of 64.
    assert reason is not None
    assert reason.startswith("the client takes 10 steps a round; its update is a gradient only after one")


def without_record(study: dict[str, Any]) -> dict[str, Any]:
    return {**study, "training": {k: v for k, v in study["training"].items() if k != "record"}}


@pytest.mark.parametrize(
    ("study", "line"),
    [
        (
            {**without_record(FEDERATED), "attack": [{"name": "dlg"}]},
            "study.toml: attack[0]: dlg goes against recorded training; record it: [training.record] parties = "
            "['fed_server']",
        ),
        (
            small(attack=[{"name": "dlg"}]),
            "study.toml: attack[0]: dlg: Dlg needs weights before and after local training; only an aggregation "
            "server gets those, in a schedule that has one, such as 'splitfed_v1'",
        ),
        (
            small(attack=[{"name": "norm"}]),
            "study.toml: attack[0]: norm: party 'server' is given the labels of 'fc2': it has none to predict",
        ),
        (
            small(attack=[{"name": "membership_releases", "adversary": "client0"}]),
            "study.toml: attack[0]: membership_releases by client0: MembershipReleases needs releases; this run does "
            "not grant that",
        ),
        (
            {**placed("u_shaped"), "attack": [{"name": "insider_labels"}]},
            "study.toml: attack[0]: insider_labels: InsiderLabels needs a training attack, train(..., "
            "adversaries=Adversaries({party: ...})); this run does not grant that",
        ),
    ],
)
def test_a_study_is_refused_before_training(study: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidStudy) as error:
        checked(study)
    assert error.value.lines == (line,)


def test_a_study_may_attack_recorded_training() -> None:
    grid = checked({**FEDERATED, "attack": [{"name": "dlg", "iterations": 2}]})
    assert build.attack(grid.cells[0].attacks[0]).phase.name == "TRAINING"


def test_labels_membership_and_classes_from_file_to_report(finished: Path) -> None:
    (folder,) = (finished / "runs").iterdir()
    attacks = {a["attack"]: a for a in json.loads((folder / "result.json").read_text("utf-8"))["attacks"]}
    assert {name: a["target"] for name, a in attacks.items()} == {
        "norm": "labels",
        "membership_threshold": "members",
        "model_inversion": "representatives",
        "unsplit": "inputs",
        "rmle": "inputs",
    }
    # A prediction that is always the most frequent label has an AUC of one half, as has a coin for membership.
    assert attacks["norm"]["scores"]["auc"]["majority"]["mean"] == 0.5
    assert attacks["membership_threshold"]["scores"]["auc"]["chance"]["mean"] == 0.5
    # As many members as there are outsiders, the 24 victims; a prediction above none of them catches 1 in 25 blindly.
    assert attacks["membership_threshold"]["victims"] == 48
    assert attacks["membership_threshold"]["scores"]["tpr_at_fpr_1%"]["chance"]["mean"] == pytest.approx(1 / 25)
    assert set(attacks["unsplit"]["stolen"]["accuracy"]) == {"clone", "trained", "fresh"}
    assert list(pd.read_csv(finished / "results.csv")["target"]) == [a["target"] for a in attacks.values()]
    page = (finished / "report.html").read_text("utf-8")
    assert all(f'<section id="{section}">' in page for section in ("pictures", "leaks", "stolen", "tradeoff", "table"))
    auc = attacks["norm"]["scores"]["auc"]["attack"]["mean"]
    assert f"party0_0 predicts the labels of 24 victims at AUC {auc:.3f} (chance 0.500)" in page


def test_the_list_on_the_command_line(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = (finished / "runs").iterdir()
    before = (folder / "result.json").read_bytes()
    assert main(["attack", str(folder), "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["party0_0", "party1_0", "server0"]
    assert all(list(attacks) == list(TABLES["attacks"]) for attacks in found.values())
    assert found["party0_0"]["norm"] is None
    assert found["party0_0"]["rmle"] == "Rmle needs releases; this run does not grant that"
    assert main(["attack", str(folder), "--list", "--adversary", "server0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "server0"
    width = max(map(len, TABLES["attacks"])) + 2
    assert f"  {'rmle':{width}}applies" in lines
    assert f"  {'norm':{width}}no: party 'server0' is given the labels of 'top_out': it has none to predict" in lines
    assert (folder / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([], "expected --attack NAMES, or --list to see which apply"),
        (["--list", "--attack", "rmle"], "expected --attack NAMES, or --list to see which apply"),
        (["--list", "--adversary", "sever0"], "unknown party 'sever0'; did you mean 'server0'?"),
        (["--attack", "norm", "--adversary", "server0"], "attack: norm: norm by server0: party 'server0' is given"),
        (["--attack", "norm", "--threat-model", "white_box"], "norm.threat_model: unknown key 'threat_model'"),
    ],
)
def test_misuse_of_attack_is_one_line(
    finished: Path, more: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder,) = (finished / "runs").iterdir()
    assert main(["attack", str(folder), *more]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert text in said


PLACES = [LABELS, FEDERATED, placed("vanilla"), placed("u_shaped"), placed("multi_task"), placed("extended_vanilla")]
PARTIES = ["server", "server0", "client0", "party0_0", "left0", "parity0", "fed_server"]
EXTRA: list[dict[str, Any]] = [{}, {}, {}, {"attribute": "odd"}, {"iterations": 3}, {"iterations": 0}]
ATTACKS = st.builds(
    lambda name, party, extra: {"name": name, **({"adversary": party} if party else {}), **extra},
    st.sampled_from(list(TABLES["attacks"])),
    st.one_of(st.none(), st.sampled_from(PARTIES)),
    st.sampled_from(EXTRA),
)


@given(st.sampled_from(PLACES), st.lists(ATTACKS, min_size=1, max_size=3))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_any_attack_anywhere_is_fine_or_refused_in_lines(study: dict[str, Any], attacks: list[dict[str, Any]]) -> None:
    try:
        cells = checked({**study, "attack": attacks}).cells
        asked = {setting.where: setting.attack.name for cell in cells for setting in cell.attacks}
        names = [asked[where] for where in sorted(asked)]
    except InvalidStudy as error:
        lines = list(error.lines)
    else:
        assert names == [attack["name"] for attack in attacks]
        return
    assert lines
    for line in lines:
        assert re.match(r"study\.toml: attack(\[\d\])?(\.\w+)?: ", line), line
        assert len(line.splitlines()) == 1


def test_an_attack_that_fails_after_training_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # That a batch has several rows is known only when one was recorded.
    study = {**FEDERATED, "attack": [{"name": "idlg"}]}
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 1, "its only run"
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    failed = json.loads((folder / "result.json").read_text("utf-8"))["failed"]
    assert failed.startswith("attack idlg: Idlg derives one class from a gradient; expected a batch of 1 row")
    assert "Traceback" not in capsys.readouterr().err
