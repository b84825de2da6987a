"""Workers that die or are suspended: nothing is lost or done twice; and what they rely on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import NameResolver
from splitfed.study.run import checked_study, session, workers
from splitfed.study.run.progress import Lines
from splitfed.study.run.store import StudyFolder
from splitfed.study.run.workers import MOST_DEATHS, Job, Workers
from tests.study.examples import small, write
from tests.study.search_examples import searching
from tests.study.test_search import outcome, states
from tests.study.test_search_killed import ended, fork_call, held_by, wait_until, workers_of

unix = pytest.mark.skipif(sys.platform == "win32", reason="processes inherit descriptors, which Windows lacks")
LEAST: dict[str, Any] = {"defense": None, "attack": None, "training": {"rounds": 2, "batch_size": 256}}

SCRIPT = """
import json, os, pathlib, signal, struct, sys, time
from multiprocessing.connection import Connection
place, connection = pathlib.Path(sys.argv[1]), Connection(int(sys.argv[2]))
tell = lambda **event: connection.send_bytes(json.dumps(event).encode())
print("a library says hello", flush=True)
while (job := json.loads(connection.recv_bytes())) is not None:
    name = job[0]
    tries = place / name
    count = len(tries.read_text()) if tries.is_file() else 0
    tries.write_text("x" * (count + 1))
    tell(event="start", run=name)
    if name.startswith("dies") and count < int(name[4:]):
        os.write(connection.fileno(), struct.pack("!i", 99) + b'{"event": "round", "do')
        os.kill(os.getpid(), 9)
    if name == "leaves" and count == 0:
        if child := os.fork():
            (place / "child").write_text(str(child))
            os.kill(os.getpid(), 9)
        time.sleep(60)
        os._exit(0)
    if name == "stops":
        (place / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    tell(event="finish", run=name, line=name)
    tell(event="done")
"""


def employ(place: Path, capsys: Any, names: list[str], count: int = 1) -> list[str]:
    """Let workers of a few lines do the runs called `names`; return what was said."""
    done: list[Job] = []
    jobs = [Job(name) for name in names]
    command = [sys.executable, "-c", SCRIPT, str(place)]
    Workers(command, None, Lines(len(names)), iter(jobs), done.append).run(count)
    found: list[str] = capsys.readouterr().err.splitlines()
    finished = [line.split("] ")[1] for line in found if line.startswith("[")]
    assert [job.name for job in done] == finished, "of each job the end is told, once"
    return found


@unix
def test_the_run_of_a_worker_that_dies_is_taken_again_in_the_same_call(tmp_path: Path, capsys: Any) -> None:
    assert employ(tmp_path, capsys, ["a", "dies2", "b"]) == [
        "[1/3] a",
        *["worker 1 ended early (killed by SIGKILL); dies2 is taken again"] * 2,
        "[2/3] dies2",
        "[3/3] b",
    ]
    assert [(tmp_path / name).read_text() for name in ("a", "dies2", "b")] == ["x", "xxx", "x"]


@unix
def test_a_run_at_which_workers_die_is_left_out_for_this_call(tmp_path: Path, capsys: Any) -> None:
    assert employ(tmp_path, capsys, ["dies9", "b"]) == [
        *["worker 1 ended early (killed by SIGKILL); dies9 is taken again"] * (MOST_DEATHS - 1),
        f"worker 1 ended early (killed by SIGKILL); dies9 is left out: {MOST_DEATHS} workers died at it; "
        "go on with --resume to try it again",
        "[1/2] b",
    ]
    assert (tmp_path / "dies9").read_text() == "x" * MOST_DEATHS
    # Where nothing is left, nobody is started.
    assert len(employ(tmp_path, capsys, ["dies99"])) == MOST_DEATHS


@unix
def test_who_is_suspended_keeps_its_run_and_the_others_go_on(tmp_path: Path, capsys: Any) -> None:
    def wake() -> None:
        while not (tmp_path / "c").is_file():
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)

    waker = threading.Thread(target=wake)
    waker.start()
    assert employ(tmp_path, capsys, ["stops", "a", "b", "c"], 2)[-1] == "[4/4] stops"
    waker.join()
    assert (tmp_path / "stops").read_text() == "x"


@unix
def test_a_worker_that_dies_is_seen_though_a_process_of_its_own_lives_on(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.2)
    try:
        assert employ(tmp_path, capsys, ["leaves"]) == [
            "worker 1 ended early (killed by SIGKILL); leaves is taken again",
            "[1/1] leaves",
        ]
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


@unix
def test_workers_that_die_before_they_begin_end_the_call() -> None:
    pool = Workers([sys.executable, "-c", "exit('no such thing')"], None, Lines(1), iter([Job("a")] * 9), print)
    with pytest.raises(workers.WorkerDied, match=r"3 workers ended before they began a run \(no such thing\); go on"):
        pool.run(2)


@unix
def test_a_second_call_on_the_same_folder_is_refused_in_one_line(tmp_path: Path, capsys: Any) -> None:
    path, folder = write(tmp_path, small(**LEAST)), tmp_path / "out"
    command = ["run", str(path), "--folder", str(folder), "--resume"]
    with StudyFolder(folder).lock():
        for more in ([], ["--workers", "2"]):
            assert main([*command, *more]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line == f"another process is at work in {str(folder)!r}; wait for it to end"
    assert main(command) == 0
    with StudyFolder(folder).lock():
        assert main(command[:-1]) == 2
    assert main(command[:-1]) == 2
    busy, done = capsys.readouterr().err.splitlines()[-2:]
    assert busy == f"another process is at work in {str(folder)!r}; wait for it to end"
    assert done == f"folder {str(folder)!r} holds this study already; add --resume to go on with it"


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children and their files are read from /proc")
def test_a_search_whose_workers_are_killed_and_suspended_is_the_same(tmp_path: Path) -> None:
    """The short form of `test_search_killed`: one worker is suspended, one killed, and one more takes what is left."""
    study = searching({"trials": 3}, study={"name": "search", "seeds": [0]}, defense=None)
    study["training"] |= {"rounds": 3, "batch_size": 16}
    path, folder = write(tmp_path, study), tmp_path / "out"
    session.run_study(checked_study.prepare_study(path), tmp_path / "through")
    process = fork_call(path, folder)
    with ended(process):
        assert wait_until(lambda: len(workers_of(process.pid)) == 2, process)
        suspended, killed = workers_of(process.pid)
        assert wait_until(lambda: bool(held_by(suspended)) and bool(held_by(killed)), process)
        os.kill(suspended, signal.SIGSTOP)
        time.sleep(0.1)
        (mine,) = (folder / "runs" / name for name in held_by(suspended))
        before = {file: file.stat().st_mtime_ns for file in mine.rglob("*")}
        os.kill(killed, signal.SIGKILL)
        # All but what the suspended one holds is done.
        assert wait_until(lambda: len(list(folder.glob("trials/*.json"))) == 2, process)
        time.sleep(0.5)
        assert {file: file.stat().st_mtime_ns for file in mine.rglob("*")} == before
        os.kill(suspended, signal.SIGCONT)
        assert process.wait() == 0, process.stderr.read()
        assert "ended early (killed by SIGKILL); trial " in process.stderr.read()
    assert states(folder) == ["COMPLETE"] * 3
    assert outcome(folder) == outcome(tmp_path / "through")


def work_alone(folder: Path, key: str) -> None:
    """Be a worker that gets no job."""
    ours, theirs = Pipe()
    ours.send_bytes(b"null")
    session.run_worker(folder, NameResolver(folder), key, os.dup(theirs.fileno()))


def test_a_check_is_not_repeated_for_the_same_study_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = write(tmp_path, small(**LEAST)), tmp_path / "out"
    ready = checked_study.prepare_study(path, folder=folder)
    session.run_study(ready, folder)
    calls: list[str] = []
    check = checked_study.check_grid

    def count(grid: Any, source: str) -> Any:
        calls.append(source)
        return check(grid, source)

    monkeypatch.setattr(checked_study, "check_grid", count)
    again = checked_study.prepare_study(path, folder=folder)
    assert calls == []
    assert (again.grid, again.text) == (ready.grid, ready.text)
    # Nor by a worker, which is told the key.
    key = session.key_of(ready.grid.resolved)
    work_alone(folder, key)
    assert calls == []
    monkeypatch.setattr("splitfed.study.trust._versions", lambda: "others")
    checked_study.prepare_study(path, folder=folder)
    work_alone(folder, key)
    assert calls == ["study.toml", "config.toml"]
    monkeypatch.undo()
    # What is kept is no reason to fail.
    (folder / "checked.json").write_text("{}")
    monkeypatch.setattr(checked_study, "check_grid", count)
    checked_study.prepare_study(path, folder=folder)
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
    ready = checked_study.prepare_study(path, folder=folder)
    session.run_study(ready, folder)
    monkeypatch.setattr(checked_study, "check_search", lambda *given: pytest.fail("it is checked again"))
    again = checked_study.prepare_study(path, folder=folder)
    assert again.grid == ready.grid
    # Nor by a worker.
    work_alone(folder, again.key)
    assert len(session.run_study(again, folder, resume=True)) == 1


def test_windows_has_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = checked_study.prepare_study(write(tmp_path, small(**LEAST)))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(InvalidInput, match="workers=2 is not allowed on Windows; expected 1"):
        session.run_study(ready, tmp_path / "out", workers=2)
    assert not (tmp_path / "out").exists()
