"""Studies without end: depth, seeds, grids and mistakes are bounded, said in a few lines, and soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitfed.cli import main
from splitfed.core.errors import InvalidInput, unknown
from splitfed.study.config import schema
from splitfed.study.config.mistakes import InvalidStudy, Mistakes
from tests.study.examples import placed, small, write

DEEP = 50_000
QUOTED = '"a b"'


def nested(text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = write(folder, small())
        path.write_text(f"{path.read_text()}\n{text}\n")
        return path

    return make


def written(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: write(folder, small(**changes))


WIDE = {"model": "mlp", "hidden": [], "width": list(range(1, 120))}
TOO_DEEP = "cannot be read as a study: it is nested more than 32 levels deep"
MANY = [f"k{i}" for i in range(20_000)]
ONE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "lists": (nested(f"[x]\na = {'[' * DEEP}{']' * DEEP}"), TOO_DEEP),
    "tables": (nested(f"[x]\na = {'{a = ' * DEEP}1{'}' * DEEP}"), TOO_DEEP),
    "names": (nested(f"[x]\n{'.'.join('a' * DEEP)} = 1"), TOO_DEEP),
    "names with spaces": (nested(f"[x]\n{' . '.join('a' * DEEP)} = 1"), TOO_DEEP),
    "names in quotes": (nested(f"[x]\n{'.'.join([QUOTED] * DEEP)} = 1"), TOO_DEEP),
    "names of a table": (nested(f"[{'.'.join('a' * DEEP)}]\nb = 1"), TOO_DEEP),
    "names in a table": (nested(f"x = {{{'.'.join('a' * DEEP)} = 1}}"), TOO_DEEP),
    "a little too deep": (nested(f"[x]\na = {'[' * 33}{']' * 33}"), TOO_DEEP),
    "seeds": (
        written(study={"name": "s", "seeds": list(range(200_000))}),
        "study.toml: study.seeds: has 200000 entries; at most 10000 are allowed",
    ),
    "one seed": (
        written(study={"name": "s", "seeds": [1] * 3000}),
        "study.toml: study.seeds: 1 is there 3000 times; expected once",
    ),
    "values": (
        written(defense=[{"name": "noise", "scale": [1 + i / 7 for i in range(20_000)]}]),
        "study.toml: defense[0].scale: has 20000 entries; at most 10000 are allowed",
    ),
    "values of several": (
        written(attack=None, defense=[{"name": "noise", "scale": list(range(1, 2001)), "on": [["a"]] * 2000}]),
        "study.toml: defense[0]: the lists make 4000000 combinations; at most 10000 are allowed",
    ),
    "parts": (
        written(defense=[{"combine": [{"name": "noise", "scale": [1.0, 2.0]}] * 15}]),
        "study.toml: defense[0]: the lists make 32768 combinations; at most 10000 are allowed",
    ),
    "pieces": (
        lambda folder: write(
            folder,
            placed("vertical", bottoms=dict.fromkeys(("left", "right"), WIDE)),
        ),
        "study.toml: topology[0]: the lists make 14161 combinations; at most 10000 are allowed",
    ),
    "runs": (
        written(study={"name": "s", "seeds": list(range(5000))}),
        "study.toml: study: the grid has 15000 runs; at most 10000 are allowed",
    ),
    "tables of a kind": (
        written(attack=[{"name": name} for name in MANY]),
        "study.toml: attack: has 20000 entries; at most 1000 are allowed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(ONE))
def test_a_study_without_end_is_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, text = ONE[kind]
    path = make(tmp_path)
    began = time.process_time()
    assert main(["plan", str(path)]) == 2
    taken = time.process_time() - began
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(text)
    # Beyond the start, which is over here: what a study needs is imported.
    assert taken < 3, taken


LINES = {
    "keys of a table": written(study={"name": "s", **dict.fromkeys(MANY, 1)}),
    "keys of an algorithm": written(data={"name": "digits", **dict.fromkeys(MANY, 1)}),
    "names": written(defense=[{"combine": [{"name": name} for name in MANY]}]),
    "schedules": written(training={"schedule": MANY}),
    "optimizers": written(training={"optimizer": {name: {"name": "Sdg"} for name in MANY}}),
}


@pytest.mark.parametrize("kind", list(LINES))
def test_many_mistakes_are_twenty_lines_and_a_number(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = LINES[kind](tmp_path)
    began = time.process_time()
    assert main(["plan", str(path)]) == 2
    taken = time.process_time() - began
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == 20
    assert all(line.startswith("study.toml: ") for line in lines)
    assert last == "and 19980 more"
    assert taken < 3, taken


def test_mistakes_that_take_long_to_find_are_not_all_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cuts = [f"r{i}" for i in range(1000)]
    path = write(tmp_path, small(topology=[{"name": "vanilla", "cut": cuts}], defense=[{"name": "none"}]))
    assert main(["plan", str(path)]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == 20
    assert last == "and at least 100 more"


def test_the_same_mistake_counts_once_however_often_it_is_noted() -> None:
    mistakes = Mistakes("s")
    for _ in range(3):
        for i in range(25):
            mistakes.add(f"x[{i}]", "is wrong")
            mistakes.add("y", unknown("thing", f"n{i}", ["a"]))
            with mistakes.at("z"):
                raise InvalidInput(f"error {i}")
    with pytest.raises(InvalidStudy) as caught:
        mistakes.stop()
    assert len(caught.value.lines) == 20
    assert caught.value.more == 55
    assert str(caught.value).endswith("\nand 55 more")
    fresh = Mistakes("s")
    fresh.take(mistakes)
    fresh.take(mistakes)
    with pytest.raises(InvalidStudy, match=r"\nand 55 more$"):
        fresh.stop()


def test_a_name_without_end_is_cut() -> None:
    text = str(unknown("key", "x" * 100_000, (f"name{i}" for i in range(5000))))
    assert len(text) < 1500
    assert text.startswith("unknown key 'xxx")
    assert text.endswith("and 4900 more)")


def test_long_words_are_looked_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(f'a = "{"b" * 2_000_000}"\nc = "{"b " * 1_000_000}"\n# {"d" * 2_000_000}\n')
    began = time.process_time()
    assert set(schema.read_toml(path)) == {"a", "c"}
    assert time.process_time() - began < 3


def test_dots_that_nest_nothing_are_read(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(f'[study]\nname = "a"\nnote = "{"." * 500} {"../" * 100} {"1.5, " * 100}"\nx = [{"0.5, " * 200}]\n')
    assert len(schema.read_toml(path)["study"]["x"]) == 200
