"""The public interface is as tests/api.txt says; whoever changes it writes the file anew, and so shows the change."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import splitfed
from splitfed.registry import TABLES
from splitfed.stats import dependence
from tests import api


def test_the_interface_is_the_one_that_was_written_down() -> None:
    changed = api.difference(api.FILE.read_text("utf-8"), api.text())
    assert not changed, (
        f"the public interface changed; if that is meant, `make api` and say so in CHANGELOG.md:\n{changed}"
    )


def test_a_lost_name_and_a_changed_signature_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = api.text()
    monkeypatch.setattr(splitfed, "__all__", [name for name in splitfed.__all__ if name != "cut"])
    # As a whole: an entry that is deleted and put back would come last.
    monkeypatch.setitem(TABLES, "attacks", {name: to for name, to in TABLES["attacks"].items() if name != "norm"})
    monkeypatch.setattr(dependence, "permutation_test", _stand_in)
    options = api.cli_options
    monkeypatch.setattr(options, "build_parser", _fewer(options.build_parser))
    told = [line for line in api.difference(before, api.text()).splitlines() if line[:3] not in ("---", "+++")]
    starts = [line.partition("(")[0].strip() for line in told]
    assert starts.count("-splitfed.cut") == 1
    assert starts.count("-splitfed.stats.dependence.permutation_test") == 1
    assert starts.count("-attacks norm") == 1
    assert any(line.startswith("-splitfed plan --schedules") for line in told)
    assert "+splitfed.stats.dependence.permutation_test(x: int, *, y: float = 0.5) -> bool" in told


def _stand_in(x: int, *, y: float = 0.5) -> bool:
    raise AssertionError


_stand_in.__module__ = dependence.__name__


def _fewer(make):  # type: ignore[no-untyped-def]
    parser, commands = make()
    plan = commands["plan"]
    plan._actions = [action for action in plan._actions if "--schedules" not in action.option_strings]
    return lambda: (parser, commands)


@dataclass
class Sample:
    first: int
    other: tuple[int, ...] = (1, 2)
    made: object = object()


Sample.__module__ = "splitfed.sample"


def test_what_differs_between_versions_is_not_written() -> None:
    assert api.constructor(Sample) == "(first: int, other: tuple[int, ...] = (1, 2), made: object = ...)"
    assert api.constructor(splitfed.InvalidInput) == ""
    assert " at 0x" not in api.text()
