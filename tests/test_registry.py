"""Every row of the registry has its file, its head and its object; a wrong name is told the nearest."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import splitfed
from splitfed import registry
from splitfed.core.errors import InvalidInput
from splitfed.registry import SINGULAR, TABLES, load, read_head
from tests.pages import contributing

ROWS = [(kind, name) for kind, table in TABLES.items() for name in table]
FOLDERS = {kind: kind for kind in TABLES} | {
    "methods": "federated",
    "aggregation": "aggregation",
    "poisoning": "poisoning",
}
CITED = ("topologies", "schedules", "defenses", "attacks", "methods")
EXAMPLES = re.findall(r'^   ```python\n(   """.*?)^   ```', contributing(), re.DOTALL | re.MULTILINE)
rows = pytest.mark.parametrize(("kind", "name"), ROWS, ids=["-".join(row) for row in ROWS])


@rows
def test_row_has_a_head(kind: str, name: str) -> None:
    found = read_head(kind, name)
    assert found.name == name
    assert len(found.summary.split()) >= 3, f"{kind}/{name}: the first line of its file is no summary"
    assert not found.summary.endswith(".")
    if kind in CITED and name != "custom":
        year = re.search(r"\b(19|20)\d\d\b", found.paper)
        assert year, (
            f"{kind}/{name}: its file cites no paper with a year; of an algorithm that no paper has, say what it is "
            'made after: "Paper: none; after AUTHORS, TITLE, VENUE YEAR."'
        )


def test_the_examples_of_the_contributing_page_have_such_a_head() -> None:
    heads = [ast.get_docstring(ast.parse(textwrap.dedent(example))) or "" for example in EXAMPLES]
    papers = [re.search(r"^Paper: .*?\b(19|20)\d\d\b", head, re.DOTALL | re.MULTILINE) for head in heads]
    assert len(papers) == 3
    assert all(papers), heads


@rows
def test_row_loads_what_it_names(kind: str, name: str) -> None:
    module, _, attribute = TABLES[kind][name].partition(":")
    package, _, file = module.rpartition(".")
    assert (package.split(".")[1], file) == (FOLDERS[kind], name), "a row's file bears its name"
    found = load(kind, name)
    assert callable(found)
    assert (found.__module__, found.__name__) == (module, attribute)


@rows
def test_row_is_shown_by_its_package(kind: str, name: str) -> None:
    found, package = load(kind, name), importlib.import_module(f"splitfed.{FOLDERS[kind]}")
    shown = getattr(package, "__all__", dir(package))
    told = f"{package.__name__} does not show {found.__name__}: import it in its __init__.py, or name it in its table"
    assert found.__name__ in shown, told
    assert inspect.unwrap(getattr(package, found.__name__)) is inspect.unwrap(found), told


@pytest.mark.parametrize("name", TABLES["attacks"])
def test_every_attack_is_shown_by_its_package(name: str) -> None:
    """A new attack is its file and its line in the registry."""
    found = load("attacks", name)
    assert getattr(splitfed.attacks, found.__name__) is found
    assert found.__name__ in splitfed.attacks.__all__
    assert found.__name__ in dir(splitfed.attacks)


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind != "attacks"])
def test_every_other_entry_is_shown_by_its_package(kind: str) -> None:
    """There a new one is also named in the package's `__init__.py`."""
    package = importlib.import_module(f"splitfed.{FOLDERS[kind]}")
    found = {name: load(kind, name) for name in TABLES[kind]}
    shown = {name: getattr(package, one.__name__, None) for name, one in found.items()}
    hidden = [name for name, one in found.items() if inspect.unwrap(shown[name]) is not inspect.unwrap(one)]
    assert hidden == [], f"not shown by splitfed.{FOLDERS[kind]}: name them in its __init__.py"


def test_what_is_no_attack_is_not_shown() -> None:
    with pytest.raises(AttributeError, match=r"module 'splitfed\.attacks' has no attribute 'Rmel'"):
        _ = splitfed.attacks.Rmel


def test_every_package_of_algorithms_is_an_attribute_and_none_uses_an_old_name() -> None:
    """In a process of its own, in which nobody has imported them; a warning of an old name would end it."""
    packages = sorted(set(FOLDERS.values()))
    code = f"""
import splitfed, warnings
print(*(getattr(splitfed, name).__name__ for name in {packages}))
warnings.simplefilter("ignore")
warnings.filterwarnings("error", "splitfed", DeprecationWarning)
[getattr(splitfed, name) for name in splitfed.__all__]
import splitfed.cli
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [f"splitfed.{name}" for name in packages], done.stderr
    assert (done.returncode, done.stderr) == (0, "")
    assert set(packages) <= set(splitfed.__all__)


@rows
def test_misspelt_row_names_the_nearest(kind: str, name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(kind, name + "_")
    text = str(caught.value)
    assert text.startswith(f"unknown {SINGULAR[kind]} '{name}_'; did you mean '{name}'")
    assert text.endswith(f"(allowed: {', '.join(sorted(TABLES[kind]))})")
    assert "\n" not in text


def test_every_kind_has_its_singular() -> None:
    assert set(SINGULAR) == set(TABLES)


def test_nothing_near_is_no_guess() -> None:
    with pytest.raises(InvalidInput, match=r"^unknown attack 'qqqq' \(allowed: "):
        load("attacks", "qqqq")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of one attack, registered as `stand_in`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.TABLES["attacks"], "stand_in", "registry_stand_in:StandIn")
    read_head.cache_clear()
    return tmp_path / "registry_stand_in.py"


def test_head_is_read_without_importing(stand_in: Path) -> None:
    text = '"""Guesses zero everywhere.\n\nPaper: A. Author,\n  Zero, 2020.\n\nMore.\n"""\nraise ImportError\n'
    stand_in.write_text(text, "utf-8")
    assert read_head("attacks", "stand_in") == ("stand_in", "Guesses zero everywhere", "A. Author, Zero, 2020.")


def test_head_without_paper_or_docstring(stand_in: Path) -> None:
    stand_in.write_text('"""Only a summary."""\n', "utf-8")
    assert read_head("attacks", "stand_in") == ("stand_in", "Only a summary", "")
    read_head.cache_clear()
    stand_in.write_text("x = 1\n", "utf-8")
    assert read_head("attacks", "stand_in") == ("stand_in", "", "")


def test_missing_file_is_named(stand_in: Path) -> None:
    with pytest.raises(ImportError, match=r"^attacks/stand_in is registered, but its file is not installed$"):
        read_head("attacks", "stand_in")


def test_load_returns_the_object(stand_in: Path) -> None:
    stand_in.write_text('"""Guesses zero."""\nclass StandIn:\n    answer = 42\n', "utf-8")
    assert load("attacks", "stand_in").answer == 42
