"""Algorithms of another package, found by entry points: listed, used in a study, attacked, and named where broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from splitfed.registry import CONTRACTS, TABLES
from splitfed.study.config.toml import dumps

TOY = Path(__file__).parent
KINDS = {
    "attacks": "toy_nearest",
    "defenses": "toy_sign",
    "topologies": "toy_topology",
    "schedules": "toy_reverse",
    "methods": "toy_method",
    "data": "toy_digits",
    "models": "toy_net",
}
STUDY: dict[str, Any] = {
    "study": {"name": "plugins", "seeds": [0]},
    "data": {"name": "toy_digits", "rows": 200, "victims": 8, "auxiliary": 32},
    "model": {"name": "toy_net", "width": 12},
    "training": {"rounds": 1, "batch_size": 64, "schedule": {"name": "toy_reverse"}},
    "method": [{"name": "toy_method"}],
    "topology": [{"name": "toy_topology", "cut": "relu"}],
    "defense": [{"name": "none"}, {"name": "toy_sign", "share": 0.25}],
    "attack": [{"name": "toy_nearest"}],
}


def describe(folder: Path, groups: dict[str, dict[str, str]], name: str = "other", version: str = "2.0") -> None:
    """Write into `folder` what an installer writes of a package with entry points `groups`."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")


def splitfed(*words: object, path: Path, code: int = 0) -> tuple[str, str]:
    """Run the command line in a process of its own that finds the packages in `path`; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(path), "COLUMNS": "200"}
    command = [sys.executable, "-m", "splitfed", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def install(target: Path) -> None:
    """Put the toy package into `target`, as `pip install --target` does, without building it."""
    project = tomllib.loads((TOY / "pyproject.toml").read_text("utf-8"))["project"]
    describe(target, project["entry-points"], project["name"], project["version"])
    (target / "toy_splitfed").symlink_to(TOY / "toy_splitfed")


def test_the_toy_package_has_one_of_each_kind() -> None:
    assert set(CONTRACTS) <= set(TABLES)
    assert {kind for kind in TABLES if kind in KINDS} == set(KINDS)


def test_a_package_adds_one_of_each_kind_to_the_lists(tmp_path: Path) -> None:
    install(tmp_path / "packages")
    listed = json.loads(splitfed("list", "--json", path=tmp_path / "packages")[0])
    for kind, name in KINDS.items():
        (head,) = [one for one in listed[kind] if one["name"] == name]
        assert head["summary"].startswith("Toy ")
        assert head["summary"].endswith("(toy-splitfed 1.0)")
        assert head["paper"] == "none; an example of a plug-in."


@pytest.mark.exhaustive
def test_what_a_package_adds_is_used_in_a_study_and_told_in_the_report(tmp_path: Path) -> None:
    install(tmp_path / "packages")
    (tmp_path / "study.toml").write_text(dumps(STUDY), "utf-8")
    out = tmp_path / "out"
    splitfed("run", tmp_path / "study.toml", "--folder", out, path=tmp_path / "packages")
    page = (out / "report.html").read_text("utf-8")
    assert "toy_nearest" in page
    assert "toy_sign(share=0.25)" in page
    run = next((out / "runs").iterdir())
    splitfed("attack", run, "--attack", "toy_nearest", path=tmp_path / "packages")
    _, error = splitfed("attack", run, "--attack", "toy_nearest", path=tmp_path, code=2)
    assert "config.toml: data.name: unknown data set 'toy_digits'" in error, "without the package, a line for each name"


BROKEN = {
    "gone": ("no_such_package:Name", "cannot be imported from 'no_such_package:Name'"),
    "other": ("json:JSONDecoder", "is 'json:JSONDecoder'; expected a subclass of splitfed"),
    "function": ("json:dumps", "is 'json:dumps'; expected a subclass of splitfed.attacks.base:Attack"),
}


def test_a_broken_one_is_named_in_a_line_and_breaks_nothing_else(tmp_path: Path) -> None:
    describe(tmp_path / "packages", {"splitfed.attacks": {name: target for name, (target, _) in BROKEN.items()}})
    code = (
        "import splitfed\nfrom splitfed.registry import load, read_head\n"
        f"for name in {list(BROKEN)}:\n"
        "    read_head('attacks', name); load('attacks', 'norm')\n"
        "    try: load('attacks', name)\n"
        "    except splitfed.InvalidInput as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == len(BROKEN), done.stderr
    for line, (name, (_, why)) in zip(lines, BROKEN.items(), strict=True):
        assert line.startswith(f"attack {name!r} of other 2.0 {why}")


def test_a_file_that_cannot_be_read_is_named_in_the_list(tmp_path: Path) -> None:
    describe(tmp_path, {"splitfed.attacks": {"mine": "broken_file:Name", "gone": "no_such_package.inner:Name"}})
    (tmp_path / "broken_file.py").write_text("def (", "utf-8")
    out, _ = splitfed("list", "attacks", path=tmp_path)
    assert "cannot be read (SyntaxError" in out
    assert "cannot be read (ModuleNotFoundError" in out
    assert "  norm " in out


def test_a_name_that_is_taken_is_left_to_who_had_it(tmp_path: Path) -> None:
    describe(tmp_path, {"splitfed.attacks": {"norm": "toy_splitfed.attack:ToyNearest"}})
    out, error = splitfed("list", "attacks", path=tmp_path)
    assert "attack 'norm' of other 2.0 is left out: splitfed has one of that name" in error
    assert out.count("  norm ") == 1


@pytest.mark.exhaustive
def test_a_package_that_pip_installed_is_found(tmp_path: Path) -> None:
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", tmp_path / "packages")
    copied = tmp_path / "toy"
    subprocess.run(["cp", "-r", TOY, copied], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, copied]
    subprocess.run(list(map(str, pip)), check=True, capture_output=True)
    assert "toy_nearest" in splitfed("list", "attacks", path=tmp_path / "packages")[0]


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    """Packages of which one ends the process while it is imported, and one prints."""
    packages = tmp_path / "packages"
    for name, code in (("quits", "import sys\nsys.exit(0)"), ("talks", "print('hello')")):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(code)
        (packages / name / "one.py").write_text('"""One."""\nfrom splitfed.attacks import Rmle as Found\n')
    describe(packages, {"splitfed.attacks": {"quits": "quits.one:Found", "talks": "talks.one:Found"}})
    return packages


def test_one_that_ends_the_process_or_prints_changes_neither_the_exit_nor_the_output(loud: Path) -> None:
    """`sys.exit(0)` while it is imported left `list` empty and successful, and what it printed broke the JSON."""
    out, _ = splitfed("list", "attacks", "--json", path=loud)
    said = {entry["name"]: entry["summary"] for entry in json.loads(out)}
    assert said["quits"] == "cannot be read (SystemExit: 0)"
    assert said["talks"] == "One (other 2.0)"
    assert "rmle" in said


@pytest.mark.exhaustive
def test_one_that_ends_the_process_or_prints_changes_no_plan(loud: Path, tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    tables = {"data": {"name": "digits", "victims": 8, "auxiliary": 32}, "model": {"name": "mlp"}}
    tables |= {"topology": [{"name": "vanilla", "cut": "relu1"}], "training": {"rounds": 1}}
    for name, code in (("talks", 0), ("quits", 2)):
        study.write_text(dumps({"study": {"name": "x"}, **tables, "attack": [{"name": name}]}), "utf-8")
        out, said_of = splitfed("plan", study, "--json", path=loud, code=code)
        if code:
            assert "attack 'quits' of other 2.0 cannot be imported from 'quits.one:Found' (SystemExit: 0)" in said_of
        else:
            json.loads(out)
