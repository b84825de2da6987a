"""A person's own runs need no word; those of somebody else run no code and read no file unless they are trusted."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tomllib
from collections.abc import Callable, Hashable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pytest

import splitfed
from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.registry import TABLES, load as load_algorithm
from splitfed.study.config.schema import PartsTable, StudyConfig
from splitfed.study.config.toml import dumps
from splitfed.study.config.values import EXTRA, _flatten_hint, holds_type, parameters_of, tables_in
from splitfed.study.trust import (
    KEY_BYTES,
    NoKey,
    _files_outside,
    code_of,
    find_link_out,
    get_or_make_key,
    import_paths,
    is_results,
    key_file,
    path_inside,
    read_key,
)
from tests.study.examples import placed, small, write

NET = """
import os, pathlib
from collections import OrderedDict
from torch import nn
import trusted_width
if "NOTICED" in os.environ:
    pathlib.Path(os.environ["NOTICED"]).touch()
def net(shape, outputs, width=trusted_width.WIDTH):
    layers = [("flatten", nn.Flatten()), ("fc1", nn.Linear(64, width)), ("relu1", nn.ReLU())]
    return nn.Sequential(OrderedDict([*layers, ("fc2", nn.Linear(width, outputs))]))
"""
RUN = "vanilla-relu1--none--seed0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with a model of its own, done by somebody whose key lies in `state`; its Python files are gone since."""
    home = tmp_path_factory.mktemp("made")
    (home / "trusted_net.py").write_text(NET)
    (home / "trusted_width.py").write_text("WIDTH = 12\n")
    study = small(
        model={"name": "trusted_net:net", "width": 13},
        training={"rounds": 1, "batch_size": 64},
        defense=[{"name": "none"}],
        attack=[{"name": "rmle", "iterations": 2}],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        assert main(["run", str(write(home, study)), "--folder", str(home / "out"), "--json"]) == 0
    for name in ("trusted_net.py", "trusted_width.py"):
        (home / name).unlink()
    np.save(home / "x.npy", np.zeros((2, 1, 8, 8), dtype=np.float32))
    return home


@pytest.fixture
def out(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the results, in the hands of the one who made them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(made / "state"))
    monkeypatch.setenv("NOTICED", str(tmp_path / "noticed"))
    return Path(shutil.copytree(made / "out", tmp_path / "out"))


@pytest.fixture
def stranger(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, in the hands of somebody else."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    return out


def commands(made: Path, out: Path) -> dict[str, list[str]]:
    run = str(out / "runs" / RUN)
    return {
        "attack": ["attack", run, "--attack", "membership_threshold"],
        "attack --list": ["attack", run, "--list"],
        "predict": ["predict", run, "--input", str(made / "x.npy")],
        "audit": ["audit", run, "--trials", "40"],
        "run --resume": ["run", str(out / "study.toml"), "--folder", str(out), "--resume"],
        "run": ["run", str(out / "runs" / RUN / "config.toml"), "--folder", str(out / "new")],
        "plan": ["plan", str(out / "config.toml")],
    }


def said(capsys: pytest.CaptureFixture[str], command: list[str]) -> tuple[int, str]:
    capsys.readouterr()
    return main(command), capsys.readouterr().err


def test_what_a_run_leaves_behind(made: Path) -> None:
    run = made / "out" / "runs" / RUN
    assert {path.name for path in (run / "code").iterdir()} == {"trusted_net.py", "trusted_width.py"}
    assert (run / "code" / "trusted_net.py").read_text() == NET
    assert set(json.loads((run / "mark.json").read_text())) == {"files", "mark"}
    key = made / "state" / "splitfed" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert key.read_bytes().hex() not in (run / "mark.json").read_text()


def test_nothing_of_a_stranger_is_run(made: Path, stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.relative_to(stranger) for path in stranger.rglob("*"))
    for name, command in commands(made, stranger).items():
        code, error = said(capsys, command)
        assert code == 2, name
        assert error.count("\n") == 1, error
        assert "is not known to be your own (" in error, error
        assert "and would import 'trusted_net:net': that can run code" in error, error
        assert "add --trust if you trust whoever made it" in error
        assert not Path(os.environ["NOTICED"]).exists(), name
    assert sorted(path.relative_to(stranger) for path in stranger.rglob("*")) == before
    assert main(["report", str(stranger)]) == 0
    assert not Path(os.environ["NOTICED"]).exists()
    assert not key_file().exists()


def test_a_stranger_may_be_trusted(made: Path, stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, [*commands(made, stranger)["predict"], "--trust"]) == (0, "")
    assert Path(os.environ["NOTICED"]).exists()
    # Trusted once is not trusted for ever.
    assert said(capsys, commands(made, stranger)["predict"])[0] == 2


def test_own_runs_need_no_word(made: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the code that they were trained with, though the study's files are gone; also after another attack."""
    for name in ("predict", "attack", "predict"):
        assert said(capsys, commands(made, out)[name]) == (0, ""), name
    assert Path(os.environ["NOTICED"]).exists()
    assert not list(out.rglob("__pycache__"))


def test_python_asks_as_the_commands_do(made: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert splitfed.load_study(out).load(RUN).history
    Path(os.environ["NOTICED"]).unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    study = splitfed.load_study(out)
    assert study.runs == (RUN,)
    assert len(study.frame()) == 1
    for load in (lambda: study.load(RUN), lambda: splitfed.load(out / "runs" / RUN)):
        with pytest.raises(InvalidInput, match=r"is not known to be your own .* in Python trust=True"):
            load()
    assert not Path(os.environ["NOTICED"]).exists()
    assert splitfed.load_study(out, trust=True).load(RUN).history
    assert Path(os.environ["NOTICED"]).exists()


def test_a_link_out_of_a_run_of_train_is_not_followed(tmp_path: Path) -> None:
    topology = splitfed.topologies.vanilla(splitfed.models.mlp((1, 8, 8), 10, hidden=[4]), "relu1")
    data = splitfed.data.digits().rows(range(200)).clients(1, victims=4)
    splitfed.train(topology, data, rounds=1, logging=splitfed.Logging(tmp_path / "run"))
    (tmp_path / "run" / "more").symlink_to(tmp_path)
    with pytest.raises(InvalidInput, match="it holds a link that leads out of it"):
        splitfed.load(tmp_path / "run", topology, data)


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    changed = text.replace(old, new)
    if path.suffix == ".toml":
        # As somebody does who wants it to pass for whole: a digest is no secret.
        path.write_bytes(digests.toml_with_digest(changed.rpartition(digests.COMMENT)[0]))
    else:
        path.write_text(changed, "utf-8")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another model": (
        lambda run: replaced(run / "config.toml", '"trusted_net:net"', '"trusted_width:net"'),
        "its mark is not yours, or its configuration has changed since), and would import 'trusted_width:net'",
    ),
    "another argument": (
        lambda run: replaced(run / "config.toml", "width = 13", "width = 14"),
        "its mark is not yours, or its configuration has changed since), and would import 'trusted_net:net'",
    ),
    "another file": (
        lambda run: (run / "code" / "trusted_width.py").write_text("WIDTH = 13\n"),
        "its code/trusted_width.py has changed since it was marked)",
    ),
    "a file that is gone": (
        lambda run: (run / "code" / "trusted_width.py").unlink(),
        "its code/trusted_width.py has changed since it was marked)",
    ),
    "another hash": (
        lambda run: replaced(run / "mark.json", '"files": {', '"files": {"x.py": "0",'),
        "its mark is not",
    ),
    "no mark": (lambda run: (run / "mark.json").unlink(), "it has no mark of yours)"),
    "an empty mark": (lambda run: (run / "mark.json").write_text("{}"), "its mark.json cannot be read)"),
    "a list": (lambda run: (run / "mark.json").write_text("[1]"), "its mark.json cannot be read)"),
    "a number": (
        lambda run: (run / "mark.json").write_text('{"files": {}, "mark": 3}'),
        "its mark.json cannot be read)",
    ),
    "a deep mark": (lambda run: (run / "mark.json").write_text("[" * 99_999), "its mark.json cannot be read)"),
    "a link to code": (
        lambda run: (run / "code" / "more.py").symlink_to(__file__),
        f"it holds a link that leads out of it), and would follow 'runs/{RUN}/code/more.py'",
    ),
    "a link to write through": (
        lambda run: (run / "attacks" / "more.json").symlink_to(run.parent.parent.parent / "elsewhere"),
        f"it holds a link that leads out of it), and would follow 'runs/{RUN}/attacks/more.json'",
    ),
    "a link in a circle": (
        lambda run: (run / "circle").symlink_to(run / "circle"),
        f"it holds a link that leads out of it), and would follow 'runs/{RUN}/circle'",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_mark_outlives_a_change(
    made: Path, out: Path, change: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make, text = CHANGES[change]
    make(out / "runs" / RUN)
    code, error = said(capsys, commands(made, out)["attack"])
    assert (code, error.count("\n")) == (2, 1), error
    assert text in error
    assert not Path(os.environ["NOTICED"]).exists()
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study without code of its own, done by anybody."""
    home = tmp_path_factory.mktemp("plain")
    study = small(training={"rounds": 1, "batch_size": 64}, defense=None, attack=None)
    assert main(["run", str(write(home, study)), "--folder", str(home / "out"), "--json"]) == 0
    return home / "out"


def test_no_model_is_a_command(
    made: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study, and a run that somebody put a command into, whatever is done with them, trusted or not."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    out, noticed = Path(shutil.copytree(plain, tmp_path / "out")), tmp_path / "noticed"
    model = {"name": "subprocess:Popen", "args": ["touch", str(noticed)]}
    for file in (out / "config.toml", out / "study.toml", out / "runs" / RUN / "config.toml"):
        file.write_bytes(digests.toml_with_digest(dumps({**tomllib.loads(file.read_text("utf-8")), "model": model})))
    study = str(write(tmp_path, small(model=model)))
    given = {
        **commands(made, out),
        "plan it": ["plan", study],
        "run it": ["run", study, "--folder", str(tmp_path / "x")],
    }
    text = "model 'subprocess:Popen' is part of Python itself, which has no models; expected a subclass of"
    for name, command in given.items():
        code, error = said(capsys, command)
        assert (code, noticed.exists()) == (2, False), name
        assert "and would import 'subprocess:Popen'" in error or text in error
    for name in ("attack", "plan"):
        code, error = said(capsys, [*given[name], "--trust"])
        assert (code, noticed.exists()) == (2, False), name
        assert text in error
    assert main(["report", str(out)]) == 0
    assert not noticed.exists()


def test_an_interrupted_study_is_resumed_by_who_wrote_it_alone(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The study's own file is what counts: results of somebody else bring no code into it, and no links."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    study = write(tmp_path, small(defense=None, attack=None, training={"rounds": 1, "batch_size": 64}))
    assert main(["run", str(study), "--folder", str(tmp_path / "out"), "--json"]) == 0
    (tmp_path / "out" / ".turn").unlink(missing_ok=True)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "out" / ".turn").symlink_to(tmp_path / "victim")
    code, error = said(capsys, ["run", str(study), "--folder", str(tmp_path / "out"), "--resume"])
    assert code == 2
    assert "it holds a link that leads out of it), and would follow '.turn'" in error
    assert (tmp_path / "victim").read_text() == "mine"
    assert not key_file().exists()  # nothing of this study reaches outside


def test_data_outside_of_a_strangers_folder_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    secret = tmp_path / "secret.csv"
    rows = "\n".join(f"{i},{i * i % 7},{i % 2}" for i in range(120))
    secret.write_text(f"a,b,y\n{rows}\n")
    study = small(
        data={"name": "csv", "path": "secret.csv", "target": "y", "victims": 8, "auxiliary": 16},
        training={"rounds": 1, "batch_size": 16},
        defense=None,
        attack=None,
    )
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out"), "--json"]) == 0
    run = tmp_path / "out" / "runs" / RUN
    assert not (run / "code").exists()
    command = ["attack", str(run), "--attack", "membership_threshold"]
    assert said(capsys, ["attack", str(run), "--list"])[0] == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    code, error = said(capsys, command)
    assert code == 2
    assert f"(no key can be read from {str(tmp_path / 'other' / 'splitfed' / 'key')!r} (No such file" in error
    assert f"and would read {str(secret)!r}: that can run code or read files of yours" in error
    for path in ("../../../secret.csv", "link.csv", "~/secret.csv", "in\\u0000side.csv"):
        replaced(run / "config.toml", tomllib.loads((run / "config.toml").read_text())["data"]["path"], path)
        assert said(capsys, command)[0] == 2, path
        if path == "../../../secret.csv":
            (run / "link.csv").symlink_to(secret)
    (run / "link.csv").unlink()
    (run / "data").mkdir()
    shutil.copy(secret, run / "data" / "secret.csv")
    config = tomllib.loads((run / "config.toml").read_text())
    config["data"]["path"] = "data/secret.csv"
    (run / "config.toml").write_bytes(digests.toml_with_digest(dumps(config)))
    assert said(capsys, ["attack", str(run), "--list"])[1] == ""


def test_import_paths_are_found_wherever_one_could_be_followed() -> None:
    study = placed("vertical", top={"model": "a.b:c", "hidden": []})
    study["model"] = {"name": "d:e", "f": "g:h"}
    study["method"] = [{"name": "fml", "meme": {"model": "i:j"}}]
    study["attack"] = [{"name": "rmle", "adversary": "server"}]
    assert sorted(import_paths(study)) == ["a.b:c", "d:e", "i:j"]
    assert list(import_paths({"model": "mlp", "topology": 3, "data": {"name": "x:y"}})) == ["x:y"]
    assert (
        list(import_paths({"data": {"name": "csv", "path": "c:/x"}, "topology": [{"segments": [{"name": "a:b"}]}]}))
        == []
    )
    # What was overlooked is refused where it would be followed.
    code = code_of(Path(__file__).parents[1] / "benchmarks", {}, trust=False)
    with pytest.raises(InvalidInput, match=r"is not known to be your own"):
        code.find("torch.nn:Linear")


def is_path(hint: Any) -> bool:
    """Return whether a parameter with this hint is the path of a file or of a folder."""
    return holds_type(hint, Path) or any(get_origin(one) is os.PathLike for one in get_args(hint))


REACHES = [
    (kind, name, one.name)
    for kind in TABLES
    for name in TABLES[kind]
    for one in parameters_of(load_algorithm(kind, name)).values()
    if is_path(one.hint)
]


def test_every_path_of_the_schema_is_seen_wherever_it_stands(tmp_path: Path) -> None:
    """Of all that is registered, at any depth; a kind that begins to read files must be looked at."""
    assert {kind for kind, _, _ in REACHES} == {"data", "models"}
    assert len(REACHES) > 8
    for _, name, key in REACHES:
        table, inside = {"name": name, key: "../elsewhere"}, {"name": name, key: "here"}
        for config in (
            {"data": table},
            {"model": [table]},
            {"topology": [{"name": "vertical", "bottom": {"model": name, key: "/etc/passwd"}}]},
            {"data": {"name": {"choice": ["digits", name]}, key: {"choice": ["here", "~/there"]}}},
        ):
            assert list(_files_outside(tmp_path, config)), (name, key)
        assert not list(_files_outside(tmp_path, {"data": inside, "model": [inside]}))
    for where in ("/elsewhere", "../keys", "~/keys"):
        assert list(_files_outside(tmp_path, {"encryption": [{"protocol": "weight_shares", "key_folder": where}]}))


# Texts of a study's own tables that no list of names bounds; each of them is no path, or is seen by what is named.
FREE_TEXTS = {
    *("study.name", "data.name", "model.name", "topology.name", "method.name", "defense.name", "defense.combine"),
    *("attack.name", "attack.budget", "attack.adversary", "callback.name"),  # names, import paths and labels
    *("training.device", "training.record", "training.schedule", "training.speeds", "training.optimizer"),
    *("training.batch_size", "encryption.protocol", "search.objectives", "search.constraints"),
    "search.storage",  # an address: seen as one
    *(f"data.{part.name}" for part in fields(PartsTable)),  # import paths and names of columns
}


def free_texts(table: type[Any], place: str = "") -> set[str]:
    found: set[str] = set()
    for name, parameter in parameters_of(table).items():
        if (inner := tables_in(parameter.hint)) is not None:
            found |= free_texts(inner[1], f"{place}{name}.")
        elif name != EXTRA and {str, Any} & {one for one in _flatten_hint(parameter.hint) if isinstance(one, Hashable)}:
            found.add(f"{place}{name}")
    return found


def test_a_new_text_in_the_schema_has_to_be_looked_at() -> None:
    assert free_texts(StudyConfig) <= FREE_TEXTS


def test_a_strangers_study_writes_no_keys_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, keys = tmp_path / "out", tmp_path / "home" / ".ssh"
    folder.mkdir()
    study = small(topology=[{"name": "u_shaped", "cuts": ["fc1", "relu1"]}], defense=None, attack=None)
    path = write(folder, {**study, "encryption": {"key_folder": str(keys)}})
    (folder / "config.toml").write_bytes(digests.toml_with_digest(path.read_text()))
    code, error = said(capsys, ["run", str(path), "--folder", str(folder), "--resume"])
    assert code == 2
    assert f"and would read {str(keys)!r}" in error
    assert not keys.exists()


def test_a_folder_of_results_is_told_from_one_of_studies(made: Path, tmp_path: Path) -> None:
    assert is_results(made / "out")
    assert is_results(made / "out" / "runs" / RUN)
    assert not is_results(made)
    assert not is_results(tmp_path)


SIGNS = ("config.toml", "study.db", f"runs/{RUN}/run.json", f"runs/{RUN}/result.json", f"runs/{RUN}/mark.json")


@pytest.mark.parametrize("left", SIGNS)
def test_results_are_told_by_any_file_that_is_left_of_them(
    stranger: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from a folder below, where somebody has put a study beside a model of theirs."""
    for path in sorted(stranger.rglob("*"), reverse=True):
        if path.is_file() and path != stranger / left:
            path.unlink()
    (stranger / left).touch()
    assert is_results(stranger)
    below = stranger / "one" / "two"
    below.mkdir(parents=True)
    (below / "trusted_net.py").write_text(NET)
    (below / "trusted_width.py").write_text("WIDTH = 12\n")
    write(below, small(model={"name": "trusted_net:net"}))
    (stranger / "linked.toml").symlink_to(below / "study.toml")
    for study in (below / "study.toml", stranger / "linked.toml"):
        code, error = said(capsys, ["plan", str(study)])
        assert code == 2
        assert "is not known to be your own (it has no mark of yours), and would import 'trusted_net:net'" in error
    assert not Path(os.environ["NOTICED"]).exists()


def test_what_lies_around_everybodys_files_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of another program, a configuration of its own, and what lies at home or among temporary files."""
    work = tmp_path / "home" / "work"
    (work / "runs" / "events").mkdir(parents=True)
    (work / "config.toml").write_text("[tool]\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "result.json").write_text("{}")
    assert not is_results(work)
    monkeypatch.setenv("HOME", "/somewhere")
    assert is_results(work)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "home"))
    assert not is_results(work)


def test_an_own_study_is_planned_and_resumed_from_its_results(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the code that it was begun with: the study's own files are gone."""
    for command in (["plan", str(out / "config.toml")], ["run", str(out / "study.toml"), "--folder", str(out)]):
        code, error = said(capsys, [*command, *(["--resume"] if command[0] == "run" else [])])
        assert (code, error) == (0, ""), command
    assert Path(os.environ["NOTICED"]).exists()
    replaced(out / "config.toml", "width = 13", "width = 14")
    (out / "study.toml").write_text((out / "study.toml").read_text().replace("width = 13", "width = 14"))
    for name in ("config.toml", "study.toml"):
        code, error = said(capsys, ["plan", str(out / name)])
        assert code == 2
        assert "its mark is not yours, or its configuration has changed since" in error


def test_a_stranger_who_is_trusted_once_leaves_no_mark(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = ["run", str(stranger / "study.toml"), "--folder", str(stranger), "--resume"]
    assert said(capsys, [*resumed, "--trust"])[0] == 0
    assert said(capsys, resumed)[0] == 2


@pytest.mark.skipif(sys.platform == "win32", reason="modes are those of POSIX")
def test_the_key_is_made_once_and_kept_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(NoKey, match="no key can be read from"):
        read_key()
    key = get_or_make_key()
    assert get_or_make_key() == read_key() == key
    assert [path.name for path in key_file().parent.iterdir()] == ["key"]
    key_file().chmod(0o640)
    with pytest.raises(NoKey, match="is open to other users; remove it, or: chmod 600"):
        read_key()
    key_file().chmod(0o600)
    key_file().write_bytes(b"short")
    with pytest.raises(NoKey, match="holds no key; remove it"):
        get_or_make_key()
    key_file().unlink()
    (tmp_path / "elsewhere").write_bytes(key)
    key_file().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoKey, match="no key can be read from"):
        read_key()
    key_file().unlink()
    os.mkfifo(key_file())
    with pytest.raises(NoKey, match="holds no key"):
        read_key()


def test_a_relative_state_folder_is_no_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somewhere")
    if sys.platform != "win32":
        assert key_file() == Path("/somewhere/.local/state/splitfed/key")


def test_without_a_place_for_a_key_a_run_is_done_and_needs_a_word(
    made: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "trusted_net.py").write_text(NET)
    (tmp_path / "trusted_width.py").write_text("WIDTH = 12\n")
    study = tomllib.loads((out / "study.toml").read_text())
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "new"), "--json"]) == 0
    run = tmp_path / "new" / "runs" / RUN
    assert not (run / "mark.json").exists()
    command = ["predict", str(run), "--input", str(made / "x.npy")]
    code, error = said(capsys, command)
    assert code == 2
    assert "(it has no mark of yours)" in error
    assert said(capsys, [*command, "--trust"])[0] == 0


@pytest.mark.exhaustive
def test_workers_find_the_studys_own_files(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trusted_net.py").write_text(NET)
    (tmp_path / "trusted_width.py").write_text("WIDTH = 12\n")
    study: dict[str, Any] = tomllib.loads((out / "study.toml").read_text())
    study["study"]["seeds"] = [0, 1]
    study["attack"] = []
    monkeypatch.chdir(tmp_path)
    write(tmp_path, study)
    assert main(["run", "study.toml", "--folder", "two", "--workers", "2", "--json"]) == 0
    assert sorted(path.parent.name for path in (tmp_path / "two").glob("runs/*/mark.json")) == [RUN, RUN[:-1] + "1"]


def test_what_lies_inside(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "deep").mkdir(parents=True)
    (home / "deep" / "in").symlink_to("../deep")
    assert find_link_out(home) is None
    assert path_inside(home, "deep/in/x") == home / "deep" / "x"
    assert [path_inside(home, name) for name in ("../x", "/x", "deep/../../x", "a\0b")] == [None] * 4
    (home / "deep" / "out").symlink_to("../..")
    assert find_link_out(home) == "deep/out"
    assert path_inside(home, "deep/out/x") is None
    (home / "deep" / "circle").symlink_to("circle")
    assert [path_inside(home, name) for name in ("deep/circle", "deep/circle/x")] == [None, None]
    (home / "deep" / "circle").unlink()
    (tmp_path / "latest").symlink_to(home)
    (home / "deep" / "out").unlink()
    assert find_link_out(tmp_path / "latest") is None
    assert KEY_BYTES == 32
