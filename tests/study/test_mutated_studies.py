"""Studies with one or a few slips in them are right, or refused with a line a mistake: never by a failure of ours."""

from __future__ import annotations

import copy
import random
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.study.config.mistakes import InvalidStudy
from splitfed.study.config.toml import dumps
from splitfed.study.run.checked_study import prepare_study
from tests.study.examples import PLACED, placed, small
from tests.study.search_examples import searching
from tests.thinning import thin

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
WRITTEN = [text for page in PAGES for text in re.findall(r"^```toml\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)]
DEMO = Path(splitfed.__file__).parent / "study" / "config" / "demo.toml"
MADE = (
    *(placed(name) for name in PLACED),
    small(method=[{"name": "fedprox", "mu": [0.1, 1.0]}], training={"rounds": 1, "schedule": "independent"}),
    small(encryption={"protocol": "weight_shares", "bound": 8.0}, defense=None, attack=None),
    searching(),
    searching({"sampler": "nsga2", "population": 4, "constraints": ["utility <= 0.9"]}),
)
STUDIES = [*MADE, *map(tomllib.loads, (DEMO.read_text("utf-8"), *WRITTEN))]

VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2**70, -(2**70), 0.5, -0.5, 1e308, float("nan"), float("inf"), True, False),
    *("", "none", "auto", "ünïcode \n two", "a.b:C", "os:system", "x" * 300, [], [[]], [[[1]]], [1, "a"], [None], {}),
    *({"name": "none"}, {"low": 0.0, "high": 1.0}, {"choice": [1, 2]}, {"choice": []}, {"model": "mlp"}),
)
TABLES: dict[str, tuple[Any, ...]] = {
    "search": (
        {},
        {"objectives": {"utility": "maximize"}, "trials": 2},
        {"objectives": {"psnr": "up"}, "sampler": "grid", "trials": 0},
        {"objectives": {"epsilon": "minimize"}, "constraints": ["epsilon <= x"], "trials": 3},
    ),
    "encryption": (
        {},
        {"protocol": "weight_shares"},
        {"protocol": "plain_gradient"},
        {"protocol": "constant_mask", "accept_leak": True, "bound": -1.0},
        [{"protocol": "none"}, {"protocol": "none"}],
    ),
    "method": ([{"name": "fedavg"}], [{"name": "fedmd", "public": 3}], {"name": "ditto"}),
    "training": ({}, {"schedule": []}, {"optimizer": {"client": 3}}, {"speeds": {"default": {"compute": 0}}}),
}


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every key and entry in `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, one in inner for path in ((*here, key), *places(one, (*here, key)))]


def texts(value: Any) -> list[str]:
    """Return every text in `value`."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in texts(one)]


def misspell(word: str, draw: random.Random) -> str:
    i = draw.randrange(len(word)) if word else 0
    return draw.choice([word[:i] + word[i + 1 :], word[:i] + "q" + word[i:], word[::-1], word.upper()])


def rename(table: Any, last: Any, draw: random.Random) -> None:
    if isinstance(table, dict):
        table[misspell(str(last), draw) or "q"] = table.pop(last)


def replace(table: Any, last: Any, draw: random.Random) -> None:
    table[last] = copy.deepcopy(draw.choice(VALUES))


def misname(table: Any, last: Any, draw: random.Random) -> None:
    table[last] = misspell(table[last], draw) if isinstance(table[last], str) else str(table[last])


def drop(table: Any, last: Any, draw: random.Random) -> None:
    table.pop(last)


def duplicate(table: Any, last: Any, draw: random.Random) -> None:
    if isinstance(table, list):
        table.insert(last, copy.deepcopy(table[last]))
    else:
        table[last] = [copy.deepcopy(table[last]), copy.deepcopy(table[last])]


def nest(table: Any, last: Any, draw: random.Random) -> None:
    for _ in range(draw.choice([1, 1, 2, 40])):
        table[last] = draw.choice([[table[last]], {str(last): table[last]}])


def tweak(table: Any, last: Any, draw: random.Random) -> None:
    """Put another value of the same type there, which only the pieces themselves may refuse."""
    value = table[last]
    if isinstance(value, bool):
        table[last] = not value
    elif isinstance(value, (int, float)):
        table[last] = draw.choice([0, -value, value + 1, value * 1000, value / 3, type(value)(2**40)])
    elif isinstance(value, str):
        table[last] = draw.choice(TEXTS)
    elif isinstance(value, list):
        table[last] = draw.choice([value[1:], [*value, *value[:1]], value[::-1]])
    elif isinstance(value, dict) and value:
        value.pop(draw.choice(list(value)))


TEXTS = sorted({one for study in STUDIES for one in texts(study)})
MUTATIONS: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    *(rename, replace, misname, drop, duplicate, nest),
    *(tweak, tweak, tweak, tweak, tweak, tweak),
)


def mutated(seed: int) -> str:
    """Return a study with one to three slips, as TOML."""
    draw = random.Random(seed)
    study = copy.deepcopy(STUDIES[seed % len(STUDIES)])
    for _ in range(draw.choice([1, 1, 2, 3])):
        if draw.random() < 0.15:
            key = draw.choice(list(TABLES))
            study[key] = copy.deepcopy(draw.choice(TABLES[key]))
        elif known := places(study):
            *outer, last = draw.choice(known)
            table: Any = study
            for key in outer:
                table = table[key]
            draw.choice(MUTATIONS)(table, last, draw)
    # What is no table at the top stands before the tables.
    loose = {key: one for key, one in study.items() if not isinstance(one, dict) and not _is_tables(one)}
    tables = {key: one for key, one in study.items() if key not in loose}
    text = dumps({"x": loose}).partition("\n")[2] + dumps(tables)
    if draw.random() < 0.05:
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(['"', "[", "=", "\n", "]]", "\x00", "é"]) + text[place + 1 :]
    return text


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


@pytest.mark.parametrize("seed", thin(range(1000), 50))
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_study_is_right_or_refused_a_line_a_mistake(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(mutated(seed), "utf-8")
    refusal: InvalidInput | None = None
    try:
        names = [cell.id for cell in prepare_study(path).grid.cells]
    except InvalidInput as error:
        refusal, names = error, []
    if isinstance(refusal, InvalidStudy):
        lines = list(refusal.lines)
        assert lines
        assert all(re.match(r"study\.toml: \S+: \S", line) and len(line.splitlines()) == 1 for line in lines), lines
        assert len(set(lines)) == len(lines)
    elif refusal is not None:
        assert str(refusal).startswith(f"{path} cannot be read as a study: "), refusal
        assert len(str(refusal).splitlines()) == 1
    else:
        assert names
        assert len(set(names)) == len(names)
