"""The database of a search lies in its own folder, whatever that is called, and is opened only if it is harmless."""

from __future__ import annotations

import sqlite3
import struct
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from optuna.storages import RDBStorage
from optuna.study import StudyDirection

import splitfed as sf
from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.study.report.search_data import read_search_outcome
from splitfed.study.run import search_queue, trials
from splitfed.study.run.checked_study import prepare_study
from splitfed.study.run.search import write_record
from splitfed.study.run.session import run_study
from splitfed.study.run.store import StudyFolder
from tests.study.examples import small, write
from tests.study.search_examples import searching

# Signs that mean something in an address, in a template, in a pattern, or to SQLite.
NAMES = ("a?b", "a?c", "?mode=memory", "a%20b", "a b", "a#b", "{SCHEMA_VERSION}", 'say "hi"', "it's ☕", ":memory:")


def held(path: Path) -> list[str]:
    """Read the names of studies without the library that wrote them."""
    database = sqlite3.connect(path)
    found = database.execute("select study_name from studies").fetchall()
    database.close()
    return [name for (name,) in found]


def make(path: Path, name: str) -> None:
    trials.open_database(path).create_new_study([StudyDirection.MAXIMIZE], name)


def test_two_folders_never_share_a_database(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        make(tmp_path / name / "study.db", name)
        trials.check_database(tmp_path / name / "study.db", own=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert [path.name for path in (tmp_path / name).iterdir()] == ["study.db"]
        assert held(tmp_path / name / "study.db") == [name]


def test_a_database_stays_where_it_is_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    database = trials.open_database(Path("study.db"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    database.create_new_study([StudyDirection.MAXIMIZE], "a")
    assert held(tmp_path / "study.db") == ["a"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def with_trigger(path: Path) -> None:
    changed(path, "CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM studies; END")


def with_view(path: Path) -> None:
    changed(path, "DROP TABLE version_info", "CREATE VIEW version_info AS SELECT 1 AS version_info_id")


def with_check(path: Path) -> None:
    changed(path, "DROP TABLE trial_values", "CREATE TABLE trial_values (x CHECK (length(randomblob(x)) > 0))")


def with_expression(path: Path) -> None:
    changed(path, "CREATE INDEX ix_more ON trials (abs(number))")


def changed(path: Path, *commands: str) -> None:
    with sqlite3.connect(path) as database:
        for command in commands:
            database.execute(command)
    database.close()


@pytest.mark.parametrize("change", [with_trigger, with_view, with_check, with_expression])
def test_a_database_that_could_run_commands_is_refused(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    make(path, "a")
    change(path)
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="that is not as Optuna makes it, and could run commands; delete it"):
        trials.check_database(path, own=False)
    if change is not with_check:
        with pytest.raises(digests.Damaged, match="which is not Optuna's; delete it"), trials.detect_damage(path):
            pytest.fail("it was opened")
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["study.db"]


def hot_journal(path: Path, victim: Path) -> None:
    """Leave beside `path` what a crash in the middle of a write leaves there, saying that it hangs on `victim`."""
    with sqlite3.connect(path, isolation_level=None) as database:
        database.execute("PRAGMA cache_size=1")
        database.execute("BEGIN")
        database.execute("UPDATE studies SET study_name = 'b'")
        database.execute("CREATE TABLE more AS SELECT hex(randomblob(100000)) AS x")
        journal = path.with_name("study.db-journal").read_bytes()
        content = path.read_bytes()
        database.execute("ROLLBACK")
    database.close()
    path.write_bytes(content)
    name = str(victim).encode()
    tail = struct.pack(">I", 0xFFFFFFFF) + name + struct.pack(">II", len(name), sum(name)) + JOURNAL
    path.with_name("study.db-journal").write_bytes(journal + (tail if victim.name else b""))


JOURNAL = bytes.fromhex("d9d505f920a163d7")


def test_a_journal_that_names_another_file_is_not_played_back(tmp_path: Path) -> None:
    """SQLite would delete that file; what a crash of one's own leaves is played back as ever."""
    path, victim = tmp_path / "study.db", tmp_path / "thesis.tex"
    make(path, "a")
    whole = path.read_bytes()
    hot_journal(path, victim)
    victim.write_bytes(b"mine")
    for own in (True, False):
        with pytest.raises(InvalidInput, match=r"study.db-journal .*; delete"):
            trials.check_database(path, own=own)
    assert victim.read_bytes() == b"mine"
    path.with_name("study.db-journal").unlink()
    path.write_bytes(whole)
    hot_journal(path, Path())
    trials.check_database(path, own=True)
    with pytest.raises(InvalidInput, match="lies beside a database of somebody else"):
        trials.check_database(path, own=False)
    with trials.detect_damage(path):
        assert held(path) == ["a"]
    path.with_name("study.db-wal").touch()
    with pytest.raises(InvalidInput, match=r"study\.db-wal lies beside"):
        trials.check_database(path, own=False)


def overwritten(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50_000])


def of_the_future(path: Path) -> None:
    changed(path, "UPDATE alembic_version SET version_num = 'v99.0.0'")


def hole(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [overwritten, cut, of_the_future, hole], ids=lambda f: f.__name__)
def test_a_damaged_database_is_told_with_what_to_do(damage: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    make(path, "a")
    damage(path)
    began = time.monotonic()
    with pytest.raises(digests.Damaged) as caught, trials.detect_damage(path):
        trials.open_database(path)
    assert str(caught.value).startswith(f"{path} is damaged: ")
    assert str(caught.value).endswith("; delete it and go on with --resume: what is finished is kept in runs/")
    assert time.monotonic() - began < 30, "it does not wait for a lock that nobody holds"


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A search that somebody has begun, and its file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = write(tmp_path, searching())
    monkeypatch.setattr(search_queue.SearchQueue, "take", lambda self: None)
    run_study(prepare_study(path), tmp_path / "out")
    return path, tmp_path / "out"


def test_only_ones_own_search_is_gone_on_with_unasked(
    searched: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = searched
    run_study(prepare_study(path), folder, resume=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    database = (folder / "study.db").read_bytes()
    with pytest.raises(InvalidInput, match=r"is not known to be your own .* and would open its database study.db"):
        run_study(prepare_study(path), folder, resume=True)
    session = sf.SearchSession(tomllib.loads(path.read_text()), folder)
    with pytest.raises(InvalidInput, match=r"and would open its database study.db"), session:
        pytest.fail("it was opened")
    assert (folder / "study.db").read_bytes() == database
    run_study(prepare_study(path), folder, resume=True, trust=True)
    with_trigger(folder / "study.db")
    with pytest.raises(InvalidInput, match="could run commands"):
        run_study(prepare_study(path), folder, resume=True, trust=True)


def test_a_record_shows_no_run_from_outside(searched: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = searched
    for name in ("../../other", "..", "/etc", "a/b", "a\\b", "", 3):
        write_record(folder, {"trial": 0, "runs": [name]})
        with pytest.raises(digests.Damaged, match=r"00000.json is damaged: it names a run outside of its folder"):
            read_search_outcome(folder)
        with pytest.raises(InvalidInput, match="is not allowed; expected a name, no path"):
            StudyFolder(folder).results([name])  # type: ignore[list-item]


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
    assert not (folder / "study.db").exists(), "a grid has no database"
    assert main(["run", str(path), "--folder", str(folder), "--resume", "--json"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([folder.name, "study.toml"])
