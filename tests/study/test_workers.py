"""Workers that die, are suspended or lose what they hold: nothing is lost or done twice; and what they rely on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import Code
from splitfed.study.run import checked_study, session, workers
from splitfed.study.run.ownership import MOST_DEATHS, Claim, Locks, LostRun
from splitfed.study.run.progress import Lines
from splitfed.study.run.run_queue import RunQueue
from splitfed.study.run.search import do_trials, open_search
from splitfed.study.run.store import StudyFolder
from splitfed.training.description import data_digest
from tests.study.examples import small, write
from tests.study.search_examples import records, searching
from tests.study.test_search import outcome, states

unix = pytest.mark.skipif(sys.platform == "win32", reason="locks end with their process, which Windows lacks")
LEAST: dict[str, Any] = {"defense": None, "attack": None, "training": {"rounds": 2, "batch_size": 256}}

SCRIPT = """
import json, os, pathlib, sys
place = pathlib.Path(sys.argv[1])
print("a library says hello", flush=True)
for name in sys.argv[2:]:
    tries = place / name
    count = len(tries.read_text()) if tries.is_file() else 0
    if (place / f"{name}.done").is_file():
        continue
    tries.write_text("x" * (count + 1))
    print(json.dumps({"event": "start", "run": name}), flush=True)
    if name.startswith("dies") and count < int(name[4:]):
        print('{"event": "round", "do', end="", flush=True)
        os.kill(os.getpid(), 9)
    (place / f"{name}.done").touch()
    print(json.dumps({"event": "finish", "run": name, "line": name}), flush=True)
"""


def employ(place: Path, capsys: Any, names: list[str], count: int = 1) -> list[str]:
    """Let workers of a few lines do the runs called `names`; return what was said."""
    left = lambda: any(not (place / f"{name}.done").is_file() for name in names)  # noqa: E731
    workers.run_workers([sys.executable, "-c", SCRIPT, str(place), *names], count, None, Lines(len(names)), left)
    found: list[str] = capsys.readouterr().err.splitlines()
    return found


def test_the_run_of_a_worker_that_dies_is_taken_again_in_the_same_call(tmp_path: Path, capsys: Any) -> None:
    assert employ(tmp_path, capsys, ["a", "dies2", "b"]) == [
        "[1/3] a",
        *["worker 1 ended early (killed by SIGKILL); dies2 is taken again"] * 2,
        "[2/3] dies2",
        "[3/3] b",
    ]
    assert (tmp_path / "dies2").read_text() == "xxx"
    # Where the last to die leaves nothing that anybody may take, nobody is started.
    (tmp_path / "none").mkdir()
    workers.run_workers(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "none"), "dies9"], 1, None, Lines(1), lambda: False
    )
    assert (tmp_path / "none" / "dies9").read_text() == "x"


def test_workers_that_die_before_they_begin_end_the_call(tmp_path: Path) -> None:
    with pytest.raises(workers.WorkerDied, match=r"3 workers ended before they began a run \(no such thing\); go on"):
        workers.run_workers([sys.executable, "-c", "exit('no such thing')"], 2, None, Lines(1), lambda: True)


@unix
def test_a_lock_is_held_by_one_and_its_loss_is_noticed(tmp_path: Path) -> None:
    locks = Locks(tmp_path, "call")
    held = locks.claim("a")
    assert held is not None
    held.check()
    assert Locks(tmp_path, "other").claim("a") is None
    assert (locks.is_held("a"), locks.is_held("b"), locks.deaths("a"), locks.deaths("b")) == (True, False, 1, 0)
    held.release()
    assert not locks.is_held("a")
    again = locks.claim("a")
    assert again is not None
    assert locks.deaths("a") == 2
    again.release()
    # Another call begins to count anew.
    assert Locks(tmp_path, "other").deaths("a") == 0
    stale = locks.claim("a")
    assert stale is not None
    # As a network file system may lose a lock, or somebody delete its file, while its holder is suspended.
    stale.path.unlink()
    with pytest.raises(LostRun, match=r"a\.lock is held by another process now"):
        stale.check()
    newer = locks.claim("a")
    assert newer is not None
    newer.check()
    with pytest.raises(LostRun):
        stale.check()
    # What the former holder of the same file wrote is not what the present one did.
    newer.path.write_text("{}")
    with pytest.raises(LostRun):
        newer.check()


@unix
def test_a_run_at_which_workers_die_is_left_out_for_this_call(tmp_path: Path) -> None:
    home = StudyFolder(tmp_path)

    def queue(call: str, wanted: list[str]) -> RunQueue:
        return RunQueue(home, wanted, Locks(tmp_path, call))

    first = queue("one", ["a", "b"])
    for _ in range(MOST_DEATHS):
        held = first.take()
        assert held is not None
        assert held.name == "a"
        assert first.has_work()
        held.claim.release()  # as the end of a process does
    assert first.left_out() == ["a"]
    other = first.take()
    assert other is not None
    assert other.name == "b"
    # Who is suspended keeps what it has, for as long as it takes.
    assert not first.has_work()
    assert first.take() is None
    home.run(other.name).mkdir(parents=True, exist_ok=True)
    (home.run(other.name) / "result.json").write_text("{}")
    other.claim.release()
    assert not first.has_work()
    second = queue("two", ["a"])
    again = second.take()
    assert again is not None
    assert again.name == "a"
    assert second.left_out() == []


@unix
def test_who_has_lost_its_run_writes_nothing_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = session.prepare_study(write(tmp_path, small(study={"name": "small", "seeds": [0, 1]}, **LEAST)))
    done = Lines.round
    names = [cell.id for cell in ready.grid.cells]

    def lose(self: Lines, number: int, total: int) -> None:
        done(self, number, total)
        if not others:
            (tmp_path / "out" / ".locks" / f"{names[0]}.lock").unlink()
            others.append(Locks(tmp_path / "out", "another").claim(names[0]))

    notes: list[str] = []
    others: list[Claim | None] = []
    monkeypatch.setattr(Lines, "round", lose)
    monkeypatch.setattr(Lines, "note", lambda self, line: notes.append(line))
    results = session.run_study(ready, tmp_path / "out")
    assert [found["id"] for found in results] == names[1:]
    lost = tmp_path / "out" / "runs" / names[0]
    # The second round was trained, and nothing of it written.
    assert len((lost / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (lost / "result.json").exists()
    assert notes[0].startswith(f"{names[0]} is left to another process: {names[0]}.lock is held by another process")
    monkeypatch.undo()
    assert others[0] is not None
    others[0].release()
    assert len(session.run_study(ready, tmp_path / "out", resume=True)) == 2


def forked(work: Callable[[], None]) -> int:
    """Do `work` in another process, which has all that this one has loaded; return its number."""
    if child := os.fork():
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.exhaustive
@unix
def test_a_search_whose_workers_are_killed_and_suspended_is_the_same(tmp_path: Path) -> None:
    """The short form of `test_search_killed`: one worker is suspended, one killed, and one more takes what is left."""
    study = searching({"trials": 3}, study={"name": "search", "seeds": [0]}, defense=None)
    study["training"] |= {"rounds": 3, "batch_size": 64}
    ready = session.prepare_study(write(tmp_path, study))
    assert ready.search is not None
    search, folder = ready.search, tmp_path / "out"
    session.run_study(ready, tmp_path / "through")
    home = StudyFolder(folder)

    def work() -> None:
        with Path(os.devnull).open("w") as nowhere:
            do_trials(search, ready.data, folder, open_search(search, folder, "call"), Lines(1, 0, nowhere))

    def begun(number: int) -> bool:
        return Locks(folder, "call").deaths(f"trial-{number:05d}") > 0 and len(list(folder.glob("runs/*"))) > number

    def wait(what: Callable[[], bool]) -> None:
        limit = time.monotonic() + 60
        while not what():
            assert time.monotonic() < limit
            time.sleep(0.002)

    with home.lock():
        home.claim(ready.grid, ready.text, data_digest(ready.data))
        open_search(search, folder, "call")
        suspended = forked(work)
        wait(lambda: begun(0) and bool(list(folder.glob("runs/*/metrics.jsonl"))))
        os.kill(suspended, signal.SIGSTOP)
        (mine,) = folder.glob("runs/*")
        before = {path: path.stat().st_mtime_ns for path in mine.rglob("*")}
        killed = forked(work)
        wait(lambda: begun(1))
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        other = forked(work)
        assert os.waitpid(other, 0)[1] == 0
        # All but what the suspended one holds is done.
        assert sorted(records(folder)) == [1, 2]
        assert {path: path.stat().st_mtime_ns for path in mine.rglob("*")} == before
        os.kill(suspended, signal.SIGCONT)
        assert os.waitpid(suspended, 0)[1] == 0
    assert states(folder) == ["COMPLETE"] * 3
    assert outcome(folder) == outcome(tmp_path / "through")


def test_a_check_is_not_repeated_for_the_same_study_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = write(tmp_path, small(**LEAST)), tmp_path / "out"
    ready = session.prepare_study(path, folder=folder)
    session.run_study(ready, folder)
    calls: list[str] = []
    check = checked_study.check_grid

    def count(grid: Any, source: str) -> Any:
        calls.append(source)
        return check(grid, source)

    monkeypatch.setattr(checked_study, "check_grid", count)
    again = session.prepare_study(path, folder=folder)
    assert calls == []
    assert (again.grid, again.text) == (ready.grid, ready.text)
    # Nor by a worker, which is told the key.
    key = session.key_of(ready.grid.resolved)
    session.run_worker(folder, Code(folder), key, "call")
    assert calls == []
    monkeypatch.setattr("splitfed.study.run.checked._versions", lambda: "others")
    session.prepare_study(path, folder=folder)
    session.run_worker(folder, Code(folder), key, "call")
    assert calls == ["study.toml", "config.toml"]
    monkeypatch.undo()
    # What is kept is no reason to fail.
    (folder / "checked.json").write_text("{}")
    monkeypatch.setattr(checked_study, "check_grid", count)
    session.prepare_study(path, folder=folder)
    assert len(calls) == 3


def test_the_check_of_another_study_or_of_other_data_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("a,y\n0,1\n")
    resolved: dict[str, Any] = {"data": {"path": str(rows)}, "study": {"name": "a"}}
    key = session.key_of(resolved)
    assert session.key_of({**resolved, "study": {"name": "b"}}) != key
    rows.write_text("a,y\n0,1\n1,0\n")
    assert session.key_of(resolved) != key
    # Code of one's own may have changed: it is checked in every call, but once in each.
    own = {**resolved, "defense": [{"name": "mine:Noise"}]}
    found = session.Checked(session.key_of(own), (("a", "b"),))
    session.write_checked(tmp_path, found)
    assert checked_study.recall(tmp_path, own) is None
    assert checked_study.recall(tmp_path, own, "another") is None
    assert checked_study.recall(tmp_path, own, found.key) == found


def test_a_search_is_checked_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write(tmp_path, searching({"trials": 1})), tmp_path / "out"
    ready = session.prepare_study(path, folder=folder)
    session.run_study(ready, folder)
    monkeypatch.setattr(checked_study, "check_search", lambda *given: pytest.fail("it is checked again"))
    again = session.prepare_study(path, folder=folder)
    assert again.grid == ready.grid
    assert len(session.run_study(again, folder, resume=True)) == 1


def test_windows_has_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = session.prepare_study(write(tmp_path, small(**LEAST)))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(InvalidInput, match="workers=2 is not allowed on Windows; expected 1"):
        session.run_study(ready, tmp_path / "out", workers=2)
    assert not (tmp_path / "out").exists()
