"""A search from Python: `sf.study(search=...)` is the search of the TOML file, and its folder is read as frames."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.study.run.python_study import PreparedStudy
from tests.study.examples import write
from tests.study.search_examples import records, run, searching
from tests.study.test_run import timeless


def prepared(**search: Any) -> PreparedStudy:
    tables = searching({"trials": 2, **search})
    own = tables.pop("study")
    return sf.study(own["name"], seeds=own["seeds"], **tables)


def test_a_search_from_python_is_the_one_of_the_file(tmp_path: Path) -> None:
    study = prepared()
    assert (study.trials, study.runs, repr(study)) == (2, (), "PreparedStudy(search, 2 trials)")
    found = study.run(tmp_path / "python")
    assert run(write(tmp_path, searching({"trials": 2})), tmp_path / "file") == 0
    assert timeless(records(tmp_path / "python")) == timeless(records(tmp_path / "file"))
    assert found.search is not None
    assert [record["trial"] for record in found.search.records] == [0, 1]
    assert found.search.front
    assert set(found.search.runs) <= set(found.runs)
    table = found.trials_frame()
    with (tmp_path / "python" / "trials.csv").open() as file:
        assert list(csv.DictReader(file)) == list(csv.DictReader(table.to_csv(index=False).splitlines()))
    assert found.report().is_file()
    again = study.run(tmp_path / "python", resume=True)
    assert again.results == found.results


def test_what_varies_is_planned_and_shown() -> None:
    study = prepared()
    plan = study.plan()["search"]
    assert (plan["trials"], plan["sampler"]) == (2, study.checked.search.table.sampler)  # type: ignore[union-attr]
    for name, values in plan["varies"].items():
        assert name in study._repr_html_()
        assert values.split()[0] in study._repr_html_()


def test_a_grid_has_no_trials(tmp_path: Path) -> None:
    tables = searching(search=None)
    tables.pop("search")
    own = tables.pop("study")
    single = {"training": {"rounds": 1, "optimizer": {"name": "SGD", "lr": 0.1}}, "defense": "none"}
    study = sf.study(own["name"], seeds=own["seeds"], **{**tables, **single})
    assert study.trials is None
    assert study.runs
    found = study.run(tmp_path / "grid")
    assert found.search is None
    with pytest.raises(InvalidInput, match=r"holds a grid, without trials; expected a study with \[search\]"):
        found.trials_frame()


def test_a_mistake_in_a_search_is_told_in_its_line() -> None:
    with pytest.raises(InvalidInput, match=r"search\.sampler: .*annealing"):
        prepared(sampler="annealing")


def test_a_study_compares_its_settings_as_the_function_does(tmp_path: Path) -> None:
    """Beside the function itself, whose numbers have their own tests."""
    results = sf.study(
        "two", data="digits", model={"name": "mlp", "hidden": [8]}, training={"rounds": 1}, seeds=(0, 1),
        topology={"name": "vanilla", "cut": ["fc1", "relu1"]},
    ).run(tmp_path / "two")  # fmt: skip
    asked = {"axis": "topology", "metrics": ["bytes"], "rows": False}
    assert results.compare(**asked).to_json() == sf.compare(tmp_path / "two", **asked).to_json()
    with pytest.raises(InvalidInput, match="colour"):
        results.compare(axis="colour")
