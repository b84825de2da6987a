"""`[encryption]` in a study: settings and their mistakes, where keys lie, and what results, plan and report tell."""

from __future__ import annotations

import json
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.encryption.key_search import find_secret_key_files
from splitfed.encryption.keys import load_keys
from splitfed.encryption.settings import Encryption
from splitfed.study.config.schema import ComputationTable
from splitfed.study.report.document import write_report
from splitfed.study.report.summary import summarise
from splitfed.study.run import reattack
from splitfed.threats.evaluator import Evaluator
from tests.blank_figures import PICTURES
from tests.pages import ROOT, blocks
from tests.study.examples import checked, small, write
from tests.study.report_page import check

SGD = {"name": "SGD", "lr": 0.05}
SHARES = {"protocol": "weight_shares", "precision": 0.1}
RELEASES = {"name": "gaussian_release", "epsilon": 8.0, "clip": 1.0}


def study(*encryption: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a study of one short round, encrypted as the tables say."""
    given: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [4, 3]},
        "training": {"rounds": 1, "batch_size": 600, "optimizer": SGD},
        "topology": [{"name": "u_shaped", "cuts": ["relu1", "fc2"]}],
        "encryption": list(encryption),
        "defense": [{"name": "none"}],
        "attack": None,
    }
    return small(**{**given, **changes})


def test_tables_make_settings_with_all_fields() -> None:
    tables = [{"protocol": "none"}, {**SHARES, "bound": [32.0, 64.0], "keys": "shared", "key_folder": "k"}]
    cells = checked(study(*tables), Path("/base")).cells
    assert [cell.computation.label for cell in cells] == [
        "none",
        "weight_shares(precision=0.1, bound=32, keys=shared)",
        "weight_shares(precision=0.1, keys=shared)",
    ]
    # Each run has a name of its own, and one that is not encrypted says so.
    assert [cell.id.split("--")[1] for cell in cells] == [
        "none",
        "weight_shares-0.1-32-shared",
        "weight_shares-0.1-shared",
    ]
    sealed = cells[1].computation
    assert sealed.secure == Encryption(protocol="weight_shares", precision=0.1, bound=32.0, keys="shared")
    assert sealed.key_folder == "/base/k"
    assert cells[1].config["encryption"] == [sealed.table]
    # The configuration of a run means that run.
    (again,) = checked(dict(cells[1].config)).cells
    assert again.computation == sealed


def test_one_table_stands_alone_and_names_no_run() -> None:
    (cell,) = checked({**study(), "encryption": SHARES}).cells
    assert cell.computation.secure == Encryption(precision=0.1)
    assert cell.id == "u_shaped-relu1+fc2--none--seed0"
    (plain,) = checked(study({"protocol": "none"})).cells
    assert plain.computation.secure is None
    assert "encryption" not in plain.config
    assert ComputationTable().protocol == Encryption().protocol


def test_runs_with_a_defense_can_be_left_out() -> None:
    both = {"defense": [{"name": "none"}, RELEASES]}
    cells = checked(study({"protocol": "none"}, {**SHARES, "defended": False}, **both)).cells
    assert [(cell.computation.label, cell.defense.name) for cell in cells] == [
        ("none", "none"),
        ("none", "gaussian_release"),
        ("weight_shares(precision=0.1)", "none"),
    ]


WRONG = [
    (study({"protocol": "weight_share"}), r"encryption\[0\]\.protocol: .*'weight_share'; did you mean 'weight_shares'"),
    (study({"protocol": 1}), r"encryption\[0\]\.protocol: 1 is not allowed; expected text, or a list of those"),
    (study({"bond": 1.0}), r"encryption\[0\]\.bond: unknown key 'bond'; did you mean 'bound'"),
    (study({"protocol": "none", "bound": 1.0}), r"encryption\[0\]\.bound: unknown key 'bound'"),
    (study({"protocol": "none", "defended": False}), r"encryption\[0\]\.defended: unknown key 'defended'"),
    (study({"defended": "no"}), r"encryption\[0\]\.defended: 'no' is not allowed; expected "),
    (study({"protocol": "plain_gradient"}), r"encryption\[0\]\.accept_leak: .* leaks labels and activations"),
    (study({"accept_leak": 1}), r"encryption\[0\]\.accept_leak: 1 is not allowed; expected true or false"),
    (study({"bound": 0.0}), r"encryption\[0\]\.bound: bound=0\.0 is not allowed; expected a number"),
    (study({"precision": -1.0}), r"encryption\[0\]\.precision: precision=-1\.0 is not allowed"),
    (study({"precision": 1e-30}), r"encryption\[0\]: precision=1e-30 is too fine"),
    (study({"layout": "row"}), r"encryption\[0\]\.layout: unknown encryption layout 'row'; did you mean 'rows'"),
    (study({"keys": "mine"}), r"encryption\[0\]\.keys: unknown kind of keys 'mine'"),
    (study({"key_folder": 3}), r"encryption\[0\]\.key_folder: 3 is not allowed; expected text"),
    (study({"key_holder": "clent"}), r"encryption\[0\]: unknown role that holds the keys: 'clent'; did you mean 'cli"),
    (study({"parameters": "depth_9"}), r"encryption\[0\]: unknown encryption preset 'depth_9'; did you mean"),
    (study(), r"encryption: \[\] is not allowed; expected "),
    (study(SHARES, SHARES), r"encryption: weight_shares\(precision=0\.1\) is there 2 times; expected once"),
    (study({**SHARES, "defended": False}, defense=[RELEASES]), r"encryption: defended = false leaves no run: add a"),
    # Combinations.
    (study(SHARES, defense=[RELEASES]), r"encryption\[0\]: GaussianRelease acts on messages that are encrypted"),
    (
        study(SHARES, topology=[{"name": "vanilla", "cut": "relu1"}]),
        r"encryption\[0\]: the head on .* expected a U-shape",
    ),
    (
        study(SHARES, training={"schedule": "splitfed_v2", "optimizer": SGD}, data={"name": "digits", "clients": 2}),
        r"encryption\[0\]: schedule \w+ would not train the clients' shares as it trains the server's layer",
    ),
    (
        study(SHARES, training={"schedule": "splitfed_v3", "optimizer": SGD}, method=[{"name": "fedavg"}]),
        r"encryption\[0\]: method FedAvg reads weights and values of clients in plain",
    ),
    (
        study(SHARES, training={"optimizer": {"name": "Adam"}}),
        r"encryption\[0\]: optimizer Adam of 'server' is not allowed beside encryption",
    ),
    (
        study(SHARES, training={"optimizer": SGD, "speeds": {}}),
        r"training\.speeds: speeds count arithmetic in plain, and an encrypted run",
    ),
    (
        study(SHARES, topology=[{"name": "u_shaped", "cuts": ["relu1", "fc2"], "encryption": {}}]),
        r"topology\[0\]\.encryption: unknown key 'encryption'",
    ),
]


@pytest.mark.parametrize(("made", "pattern"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_mistake_is_one_line(made: dict[str, Any], pattern: str) -> None:
    with pytest.raises(InvalidInput, match=r"\Astudy\.toml: " + pattern) as caught:
        checked(made)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study of the page on encryption at a small size, a leaking protocol beside, done: runs in `out`."""
    base = tmp_path_factory.mktemp("encrypted") / "here"
    base.mkdir()
    page = tomllib.loads(blocks(ROOT / "docs" / "encryption.md", "toml")[0])
    leaking = {"protocol": "plain_gradient", "precision": 0.1, "accept_leak": True, "defended": False}
    page["study"]["seeds"], page["model"]["hidden"] = [0], [4, 3]
    page["training"] |= {"rounds": 1, "batch_size": 600}
    page["encryption"].append(leaking)
    with PICTURES.shown():
        assert main(["run", str(write(base, page)), "--folder", str(base / "out")]) == 0
    return base


def runs(done: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in sorted((done / "out" / "runs").glob("*/result.json"))]
    return {f"{one['encryption'].partition('(')[0]}, {one['defense']['name']}": one for one in found}


def test_results_name_protocol_preset_bytes_and_seconds(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = runs(done)
    assert list(found) == ["none, gaussian_release", "none, none", "plain_gradient, none", "weight_shares, none"]
    plain, sealed = found["none, none"], found["weight_shares, none"]
    # The same steps, to what encryption rounds.
    assert sealed["history"][-1]["loss"] == pytest.approx(plain["history"][-1]["loss"], abs=1e-3)
    assert sealed["predicted"]["encryption"]["parameters"] == "depth_1_coarse"
    assert sealed["predicted"]["messages"] == sealed["messages"]
    assert sealed["predicted"]["bytes"] == pytest.approx(sealed["bytes"], rel=0.01)
    assert "encryption" not in plain["predicted"]
    assert (sealed["dependence"], sealed["sizes"]) == (None, None)
    import pandas as pd

    table = pd.read_csv(done / "out" / "results.csv", keep_default_na=False).set_index("run")
    row = table.loc[sealed["id"]]
    assert (row.encryption, row.encryption_protocol) == ("weight_shares(precision=0.1)", "weight_shares")
    assert (row.encryption_parameters, int(row.bytes)) == ("depth_1_coarse", sealed["bytes"])
    assert table.loc[plain["id"]].encryption_parameters == ""
    settings = [name for name in table if name.startswith("encryption_")]
    assert settings == [f"encryption_{name}" for name in ("protocol", "parameters", "layout", "keys", "key_holder")]
    # Done already: the table is printed, and no run is repeated.
    assert main(["run", str(done / "study.toml"), "--folder", str(done / "out"), "--resume"]) == 0
    printed = capsys.readouterr().out
    assert {"preset", "bytes", "seconds", "depth_1_coarse"} <= set(printed.split())


def test_keys_lie_beside_the_study_and_a_run_is_opened_with_them(done: Path) -> None:
    sealed = runs(done)["weight_shares, none"]["id"]
    (file,) = (path for path in (done.parent / "keys").rglob("*") if path.is_file())
    assert file.resolve() == (done.parent / "keys" / sealed / "client0.key").resolve()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not list(find_secret_key_files(done / "out", load_keys(file).public))
    folder = done / "out" / "runs" / sealed
    run = reattack.rebuild_run(folder)
    assert run.history[-1]["loss"] == runs(done)["weight_shares, none"]["history"][-1]["loss"]
    # Without its file, one line.
    hidden = file.rename(file.with_suffix(".away"))
    try:
        with pytest.raises(InvalidInput, match=r"key file .* is missing: the checkpoint was written under"):
            reattack.rebuild_run(folder)
    finally:
        hidden.rename(file)
    # Another folder than that of the study is not asked for keys that were in no file.
    with pytest.raises(InvalidInput, match="keys that were not saved"):
        reattack.rebuild_run(done / "out" / "runs" / runs(done)["plain_gradient, none"]["id"])


def test_keys_inside_the_study_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, study({**SHARES, "key_folder": "out/keys"}))
    assert main(["run", str(path), "--folder", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "encryption[0]: key_folder=" in line
    assert "the folder of the study, which is copied and shared; keep keys elsewhere" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
@pytest.mark.drawn
def test_the_report_sets_encrypted_runs_beside_the_others(done: Path) -> None:
    write_report(done / "out")  # other tests have written it without figures
    text = (done / "out" / "report.html").read_text("utf-8")
    check(text)
    section = text.partition('<section id="encryption">')[2].partition("</section>")[0]
    for said in ("undefended, in plain", "gaussian_release", "undefended, weight_shares", "depth_1_coarse"):
        assert said in section
    # Three panels below each other, no wider than a telephone shows at nine tenths of its size.
    width = float(section.partition("<svg ")[2].partition('width="')[2].partition("pt")[0])
    assert width < 72 * 4.7
    shares, leaking = (section.partition(f"<b>{name}:</b>")[2].partition("Keys:")[0] for name in PROTOCOLS_SHOWN)
    assert "the server reads only sizes and times" in shares
    assert "plain numbers" not in shares
    assert "leaks labels and activations" in leaking
    assert "plain numbers" in leaking
    assert "colludes with the server reveals what it encrypted itself" in section
    # What was planned is what was counted, within what is known of ciphertexts.
    assert "Predicted and counted differ" not in text
    places = {s["encryption"]: s for s in summarise(done / "out")["settings"] if s["family"] == "none"}
    assert list(places) == ["in plain", "plain_gradient(precision=0.1)", "weight_shares(precision=0.1)"]


def test_an_attack_that_cannot_begin_is_a_result_of_an_encrypted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Evaluator.refusal

    def refuse(self: Evaluator, name: str, attack: Any, adversary: str | None) -> Any:
        sealed = self.engine.topology.computation is not None
        return "nothing to read" if sealed else before(self, name, attack, adversary)

    monkeypatch.setattr(Evaluator, "refusal", refuse)
    attacks = [{"name": "rmle", "budget": "quick", "iterations": 2}]
    path = write(tmp_path, study({"protocol": "none"}, SHARES, attack=attacks))
    assert main(["run", str(path), "--folder", str(tmp_path / "out")]) == 0
    plain, sealed = (json.loads(one.read_text()) for one in sorted((tmp_path / "out" / "runs").glob("*/result.json")))
    assert (len(plain["attacks"]), plain["refused"]) == (1, [])
    assert (sealed["attacks"], [one["why"] for one in sealed["refused"]]) == ([], ["nothing to read"])
    text = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "Attacks that found nothing to begin with" in text
    check(text)


PROTOCOLS_SHOWN = ("weight_shares", "plain_gradient")


def test_a_study_in_plain_has_no_such_section(tmp_path: Path) -> None:
    assert main(["run", str(write(tmp_path, study({"protocol": "none"}))), "--folder", str(tmp_path / "out")]) == 0
    assert 'id="encryption"' not in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_a_plan_tells_bytes_and_seconds_of_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, study({"protocol": "none"}, SHARES)))
    assert main(["plan", path, "--schedules", "sequential", "--json"]) == 0
    (place,) = json.loads(capsys.readouterr().out)["topologies"]
    plain, sealed = place["schedules"]
    assert (plain["computation"], sealed["computation"]) == ("none", "weight_shares(precision=0.1)")
    assert sealed["encryption"]["rows"] == 600
    assert sealed["encryption"]["seconds"] > 0
    assert sealed["bytes"] > 10 * plain["bytes"]
    # Two batches, of 600 rows and of 630, and a public context.
    assert sealed["bytes"] == pytest.approx(3 * sealed["encryption"]["bytes"] + 411_625, rel=1e-6)
    assert main(["plan", path, "--schedules", "sequential"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "sequential, weight_shares(precision=0.1) *: a batch of 600 rows sends " in printed
    assert "preset depth_1_coarse, layout 'batch', 24 x product with a number" in printed
