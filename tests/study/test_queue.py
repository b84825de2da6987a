"""The queue of a study lies in its own folder, whatever the folder is called."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import optuna
import pytest
from optuna.storages import RDBStorage

from splitfed.cli import main
from splitfed.study.run import search_queue, trials
from tests.study.examples import small, write
from tests.study.search_examples import opened_by_optuna

# Signs that mean something in an address, in a template, in a pattern, or to SQLite.
NAMES = ("a?b", "a?c", "?mode=memory", "a%20b", "a b", "a#b", "{SCHEMA_VERSION}", 'say "hi"', "it's ☕", ":memory:")


def waiting(path: Path) -> list[str]:
    """Read the queue without the library that wrote it."""
    queue = sqlite3.connect(path)
    found = queue.execute("select value_json from trial_user_attributes order by trial_id").fetchall()
    queue.close()
    return [json.loads(value) for (value,) in found]


def test_two_folders_never_share_a_queue(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        trials.fill_queue(trials.open_queue(tmp_path / name / "study.db"), [name], [name])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert [path.name for path in (tmp_path / name).iterdir()] == ["study.db"]
        assert waiting(tmp_path / name / "study.db") == [name]


def test_a_queue_stays_where_it_is_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    queue = trials.open_queue(Path("study.db"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    trials.fill_queue(queue, ["a"], ["a"])
    assert waiting(tmp_path / "study.db") == ["a"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_queue_made_through_an_address_is_found_again(tmp_path: Path) -> None:
    with opened_by_optuna(tmp_path / "study.db") as storage:
        made = optuna.create_study(storage=storage, study_name=trials.NAME)
        made.enqueue_trial({"run": "a"}, user_attrs={"run": "a"})
    assert [trial.user_attrs["run"] for trial in trials.open_queue(tmp_path / "study.db").get_trials()] == ["a"]


@pytest.mark.parametrize("address", [None, "sqlite:///{}"])
def test_a_locked_file_is_waited_for_as_long_as_a_suspended_worker_may_take(
    tmp_path: Path, address: str | None
) -> None:
    path = tmp_path / "study.db"
    found = search_queue.open_storage(path, None if address is None else address.format(path))
    assert isinstance(found, RDBStorage)
    with found.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 1000 * trials.LOCKED_SECONDS
    assert trials.LOCKED_SECONDS >= 300


def test_a_study_runs_and_resumes_in_a_folder_of_any_name(tmp_path: Path) -> None:
    study = small(attack=None, defense=None, training={"rounds": 1, "batch_size": 64})
    folder = tmp_path / "50 % [x] {y} #1?"
    path = write(tmp_path, study)
    assert main(["run", str(path), "--folder", str(folder), "--json"]) == 0
    assert waiting(folder / "study.db") == ["vanilla-relu1--none--seed0"]
    assert main(["run", str(path), "--folder", str(folder), "--resume", "--json"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([folder.name, "study.toml"])
