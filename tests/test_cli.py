"""The command line: what it prints, how it fails, and that it is quick where nothing heavy is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splitfed
from splitfed import __version__, cli
from splitfed.cli import main
from splitfed.encryption.settings import LEAKING, PROTOCOLS
from splitfed.registry import TABLES
from tests.study.examples import small, write


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["list"],
        ["list", "attacks", "--json"],
        ["run", "-h"],
        ["plan", "-h"],
        ["cuts", "-h"],
        ["predict", "-h"],
    ],
)
def test_help_and_lists_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from splitfed.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'pydantic', 'optuna', 'pandas', 'rich', 'matplotlib'} & set(sys.modules); "
        "sys.exit(code or (f'imported {sorted(heavy)}' if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_list_prints_names_summaries_and_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "attacks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [set(entry) for entry in found] == [{"name", "summary", "paper"}] * len(TABLES["attacks"])
    assert all(entry["summary"] and entry["paper"] for entry in found)
    assert main(["list", "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert {kind: [entry["name"] for entry in heads] for kind, heads in everything.items()} == {
        **{kind: list(table) for kind, table in TABLES.items()},
        "encryption": list(PROTOCOLS),
    }
    assert main(["list", "encryption"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("leaks labels and activations") == len(LEAKING) == 2
    assert main(["list", "attacks"]) == 0
    summaries = [entry["summary"] for entry in everything["attacks"]]
    printed = capsys.readouterr().out
    starts = {line.index(text) for line in printed.splitlines() for text in summaries if line.endswith(text)}
    assert starts == {2 + max(map(len, TABLES["attacks"])) + 2}
    assert main(["list", "defenses"]) == 0
    printed = capsys.readouterr().out
    assert "distance_correlation" in printed
    assert "NoPeek" in printed


def test_the_help_of_list_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--help"]) == 0
    named = capsys.readouterr().out.replace(",", " ").split()
    assert [kind for kind in (*TABLES, "encryption") if kind not in named] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


MISUSE = [
    (
        ["rnu"],
        "unknown command 'rnu'; did you mean 'run'? "
        "(allowed: attack, audit, compare, continue, cuts, demo, list, plan, predict, report, run)",
    ),
    (["run"], "splitfed run: the following arguments are required: study (see splitfed run --help)"),
    (["run", "s.toml", "--resum"], "unknown option '--resum'; did you mean '--resume'"),
    (["run", "s.toml", "more"], "argument 'more' is one too many (see splitfed run --help)"),
    (["run", "s.toml", "--workers", "two"], "splitfed run: argument --workers: invalid int value: 'two'"),
    (["run", "s.toml", "--workers", "0"], "workers=0 is not allowed; expected a whole number of at least 1"),
    (["run", "no/such.toml"], "no/such.toml cannot be read as a study: No such file or directory"),
    (["list", "atacks"], "unknown kind 'atacks'; did you mean 'attacks'"),
    (["report", "no/such"], "folder 'no/such' holds no study"),
    (["attack", "no/such", "--attack", "rmle"], "'no/such' holds no finished run"),
]


@pytest.mark.parametrize(("arguments", "text"), MISUSE, ids=[" ".join(arguments) for arguments, _ in MISUSE])
def test_misuse_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(text)
    assert len(err.splitlines()) == 1


def test_our_own_failures_are_one_line_and_a_traceback_only_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setitem(cli.COMMANDS, "list", broken)
    assert main(["list"]) == 1
    assert capsys.readouterr().err == "internal error: RuntimeError: two lines (--debug shows where)\n"
    with pytest.raises(RuntimeError, match="two"):
        main(["list", "--debug"])


def truncated(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    np.savez(folder / "whole.npz", x=rng.random((100, 4), dtype=np.float32), y=np.arange(100) % 2)
    content = (folder / "whole.npz").read_bytes()
    (folder / "data.npz").write_bytes(content[: len(content) // 2])
    return npz()


def npz(**more: Any) -> dict[str, Any]:
    return small(data={"name": "npz", "path": "data.npz", "victims": 8, "auxiliary": 8, **more})


def not_finite(folder: Path) -> dict[str, Any]:
    x = np.ones((100, 4), dtype=np.float32)
    x[17, 2] = np.nan
    np.savez(folder / "data.npz", x=x, y=np.arange(100) % 2)
    return npz()


def labels_outside(folder: Path) -> dict[str, Any]:
    np.savez(folder / "data.npz", x=np.ones((100, 4), dtype=np.float32), y=np.arange(100) % 3)
    return npz(task="binary")


def empty_client(folder: Path) -> dict[str, Any]:
    # 1797 - 8 - 32 = 1757 rows: two or three for each of 878 clients, all of which validate or test.
    return small(data={"name": "digits", "victims": 8, "auxiliary": 32, "clients": 878, "validation": 0.4, "test": 0.5})


def missing_value(folder: Path) -> dict[str, Any]:
    (folder / "t.csv").write_text("a,b,y\n" + "1,2,0\n" * 40 + "1,,1\n")
    return small(data={"name": "csv", "path": "t.csv", "target": "y", "victims": 4, "auxiliary": 4})


def batch_of_one(folder: Path) -> dict[str, Any]:
    return small(model={"name": "resnet8"}, topology=[{"name": "vanilla", "cut": "conv1"}], training={"batch_size": 1})


BAD = [
    (truncated, "study.toml: data: ", "data.npz is no whole .npz file: "),
    (not_finite, "study.toml: data: data: x is not finite in row 17", ""),
    (labels_outside, "study.toml: data: data: label 2 is outside [0, 1]", ""),
    (empty_client, "study.toml: data: client", " has no training rows (1 validation, "),
    (missing_value, "study.toml: data: ", "column 'b' has no value in row 41"),
    (batch_of_one, "study.toml: training.batch_size: client0 has 1230 training rows, so batch_size=1 leaves", ""),
]


@pytest.mark.parametrize(("make", "start", "text"), BAD, ids=[make.__name__ for make, _, _ in BAD])
def test_bad_input_is_one_line_and_nothing_is_written(
    make: Any, start: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = write(tmp_path, make(tmp_path)), tmp_path / "out"
    assert main(["run", str(path), "--folder", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(start)
    assert text in line
    assert not folder.exists()


def test_the_demo_is_a_valid_study() -> None:
    from splitfed.study.run import checked_study

    ready = checked_study.prepare_study(Path(splitfed.__file__).parent / "study" / "config" / "demo.toml")
    assert ready.grid.cells[0].defense.label == "none"
    assert {setting.attack.name for setting in ready.grid.cells[0].attacks} == {"strongest"}
