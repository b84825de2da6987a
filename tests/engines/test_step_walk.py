"""A training step reads as one walk: few files, each entered for one reason, told in docs/architecture.md."""

from __future__ import annotations

import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType

from torch import nn

import splitfed
from splitfed.core.defense import Defense
from splitfed.core.lazy_package import LazyPackage
from splitfed.defenses import Noise
from splitfed.schedules.base import Training
from splitfed.schedules.sequential import Sequential
from splitfed.topologies import vanilla
from tests.examples import engine_of, images
from tests.pages import read

ROOT = Path(splitfed.__file__).resolve().parent.parent
ROOMS = ("splitfed", "topologies", "attacks")
ROWS = 18
MOST_CALLS, MOST_FILES, MOST_CHANGES = 86, 8, 24


@cache
def project_file(path: str) -> str | None:
    """The file relative to the root, None where it is not ours; attacks and topologies are reached by links."""
    real = Path(path).resolve()
    ours = any(real.is_relative_to(ROOT / room) for room in ROOMS)
    return str(real.relative_to(ROOT)) if ours else None


def walk(*defenses: Defense) -> list[tuple[str, str]]:
    """File and function of every call of ours in the second of three steps, behind the calls that led there.

    Code that torch generates, and what a dataclass generates, stands in no file of ours.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    engine = engine_of(vanilla(model, "1"), *images(ROWS), defenses=defenses)
    schedule, training = Sequential(), Training(ROWS // 3)
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := project_file(frame.f_code.co_filename)) is not None:
            calls.append((file, frame.f_code.co_name))

    # What is worked out once is worked out in the first round.
    schedule.round(engine, training, 0, state := schedule.start(1))
    sys.setprofile(note)
    try:
        schedule.round(engine, training, 1, state)
    finally:
        sys.setprofile(None)
    starts = [i for i, (_, function) in enumerate(calls) if function == "stamp"]
    assert len(starts) == 3
    led_there = [calls[0], next(call for call in calls if call[1] == "train")]
    return led_there + calls[starts[1] : starts[2]]


def stops(calls: list[tuple[str, str]]) -> list[str]:
    """The files in the order they are entered, each entry once."""
    files = [file for file, _ in calls]
    return files[:1] + [after for before, after in pairwise(files) if before != after]


def test_a_step_enters_few_files_and_changes_them_seldom() -> None:
    calls = walk(Noise(scale=0.1))
    found = stops(calls)
    assert len(calls) <= MOST_CALLS
    assert len(set(found)) <= MOST_FILES, "\n".join(found)
    assert len(found) - 1 <= MOST_CHANGES, "\n".join(found)


def test_without_a_defense_only_its_files_are_missing() -> None:
    defended, plain = stops(walk(Noise(scale=0.1))), stops(walk())
    own = ["splitfed/defenses/noise.py", "splitfed/core/defense_context.py", "splitfed/core/random.py"]
    assert [file for file in dict.fromkeys(defended) if file not in own] == list(dict.fromkeys(plain))


def test_the_page_tells_the_walk_as_it_is() -> None:
    page = read(ROOT / "docs" / "architecture.md").partition("\n## The walk of a step\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w./]+)` \|", page, re.MULTILINE) == list(dict.fromkeys(stops(walk(Noise(scale=0.1)))))


def test_what_packages_show_users_adds_no_call_to_a_step() -> None:
    """Constructors that packages show check their arguments: none of these is called in a step."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, LazyPackage) and name.startswith("splitfed"):
            for shown in dir(module):
                getattr(module, shown)
    assert "splitfed/core/argument_kinds.py" not in stops(walk(Noise(scale=0.1)))
