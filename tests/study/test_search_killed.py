"""Searches of two workers, killed 30 times with SIGKILL: whole, one worker alone, and one suspended for two minutes.

No trial is lost or counted twice, no bit changes, and every run is, bit for bit, the run alone. Most calls are forked
off a process that has everything loaded, workers too, which is all that tells them from calls of the command line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from splitfed.models.import_paths import NameResolver
from splitfed.study.run import checked_study, session, workers
from tests.study.examples import write
from tests.study.search_examples import records, searching
from tests.study.test_run import timeless
from tests.study.test_search import outcome, states, weights

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children and their files are read from /proc"),
]

TRIALS, ROUNDS, KILLS, STEPS, SUSPENDED = 9, 5, 10, 14, 120.0


def study(sampler: str) -> dict[str, Any]:
    """Return a search of nine trials with two seeds each, whose rounds last long enough to be hit."""
    own: dict[str, Any] = {"sampler": sampler, "trials": None if sampler == "grid" else TRIALS}
    rate = {"low": 0.05, "high": 0.25, "step": 0.1} if sampler == "grid" else {"low": 0.01, "high": 0.5, "log": True}
    return searching(
        own,
        study={"name": "search", "seeds": [0, 1]},
        training={"rounds": ROUNDS, "batch_size": 24, "optimizer": {"name": "SGD", "lr": rate}},
        topology=[
            {"name": "vanilla", "cut": ["relu1", "fc1", "flatten"], "sent_inputs": ["input"]}
            if sampler == "grid"
            else {"name": "vanilla", "cut": ["relu1", "fc1"]}
        ],
        defense=None
        if sampler == "grid"
        else [{"name": "none"}, {"name": "noise", "scale": {"low": 0.1, "high": 2.0}}],
    )


class Forked:
    """A process as `subprocess.Popen` has it, forked off this one to do `work`; it leads a session of its own."""

    def __init__(self, work: Callable[[], None], leads: bool) -> None:
        outs, errors = os.pipe(), os.pipe()
        self.returncode: int | None = None
        if (child := os.fork()) == 0:
            self._become(work, leads, outs[1], errors[1])
        self.pid = child
        os.close(outs[1])
        os.close(errors[1])
        self.stdout, self.stderr = os.fdopen(outs[0]), os.fdopen(errors[0])

    def _become(self, work: Callable[[], None], leads: bool, out: int, error: int) -> None:
        code = 1
        try:
            if leads:
                os.setsid()
            sys.stdout, sys.stderr = os.fdopen(out, "w"), os.fdopen(error, "w")
            work()
            sys.stdout.flush()
            code = 0
        except BaseException as failure:  # noqa: BLE001 - it is told, and the process ends here
            print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        limit = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_worker(command: list[str], inherited: list[int]) -> Any:
    """Start a worker as `workers._start` does, by a fork."""
    folder, code, token, channel = command[-4:]
    return Forked(
        lambda: session.run_worker(Path(folder), NameResolver.from_json(code), token, int(channel)), leads=False
    )


def fork_call(path: Path, folder: Path) -> Any:
    """Start `splitfed run --resume --workers 2`, but for its report."""

    def call() -> None:
        workers._start = fork_worker  # type: ignore[assignment]
        ready = checked_study.prepare_study(path, folder=folder)
        session.run_study(ready, folder, resume=True, workers=2)

    return Forked(call, leads=True)


def start(path: Path, folder: Path) -> subprocess.Popen[str]:
    """Start the command line."""
    command = [
        sys.executable,
        "-m",
        "splitfed",
        "run",
        str(path),
        "--folder",
        str(folder),
        "--workers",
        "2",
        "--resume",
    ]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def workers_of(parent: int) -> list[int]:
    """Return the processes that `parent` has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(one) for one in children.read_text("utf-8").split()] if children.is_file() else []


def held_by(worker: int) -> set[str]:
    """Return the locks of runs and trials that a process has open."""
    links = []
    for one in Path(f"/proc/{worker}/fd").iterdir():
        try:
            links.append(os.readlink(one))
        except OSError:
            continue
    return {Path(link).stem for link in links if link.endswith(".lock") and "/.locks/" in link}


def progress(folder: Path) -> dict[Path, int]:
    """Return what says how far the runs in `folder` are."""
    found = {}
    for pattern in ("runs/*/metrics.jsonl", "runs/*/result.json", "trials/*.json"):
        for path in folder.glob(pattern):
            try:
                found[path] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
    return found


def wait_until(what: Callable[[], bool], process: Any) -> bool:
    """Wait for it; False if the process ends first."""
    for _ in range(60_000):
        if what():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    raise AssertionError("it did not happen within ten minutes")


@contextmanager
def ended(process: Any) -> Iterator[None]:
    """End the process and its workers with the block, whatever happens in it."""
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def kill_and_suspend(path: Path, folder: Path) -> None:
    """Kill one worker alone and suspend the other: what that one holds is not touched, and taken up by it alone."""
    process = start(path, folder)
    with ended(process):
        before = progress(folder)
        assert wait_until(lambda: progress(folder) != before, process)
        assert wait_until(
            lambda: len(workers_of(process.pid)) == 2 and held_by(workers_of(process.pid)[1]) != set(), process
        )
        one, other = workers_of(process.pid)
        os.kill(other, signal.SIGSTOP)
        time.sleep(0.2)
        held = held_by(other)
        os.kill(one, signal.SIGKILL)
        runs = [folder / "runs" / name for name in held if not name.startswith("trial-")]
        there = {file: file.stat().st_mtime_ns for home in runs for file in home.rglob("*")}
        done = len(list((folder / "trials").glob("*.json")))
        time.sleep(SUSPENDED)
        assert held_by(other) == held
        assert {file: file.stat().st_mtime_ns for home in runs for file in home.rglob("*")} == there
        print(f"suspended: {sorted(held)}; trials over meanwhile: {len(list(folder.glob('trials/*.json'))) - done}")
        os.kill(other, signal.SIGCONT)
        assert process.wait(600) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert "ended early (killed by SIGKILL)" in said, said
        assert not any("is left out" in line for line in said.splitlines()), said


def kill_often(sampler: str, begin: Callable[[Path, Path], Any], path: Path, folder: Path, times: int) -> None:
    """Kill a call with all its workers again and again: soon after it has got on, now and then before it has.

    How far a call gets is counted in what it writes, not in seconds: else a fast machine is through before the last
    kill.
    """
    dice, busy, first = random.Random(5), 0, 1.0
    for number in range(times):
        process = begin(path, folder)
        with ended(process):
            if number % 4 == 3:
                time.sleep(dice.uniform(0.0, first))
            else:
                began = time.monotonic()
                for step in range(dice.randrange(1, STEPS)):
                    before = progress(folder)
                    assert wait_until(lambda before=before: progress(folder) != before, process)  # type: ignore[misc]
                    first = first if step else time.monotonic() - began
                time.sleep(dice.uniform(0.0, 0.05))
            busy += any(held_by(worker) for worker in workers_of(process.pid))
            assert process.poll() is None
            os.killpg(process.pid, signal.SIGKILL)
    over = len(list(folder.glob("trials/*.json")))
    print(f"{sampler}: {times} kills, {busy} of them while a worker held a run; {over} trials were over by then")
    assert busy >= times // 2


@pytest.mark.parametrize("sampler", ["random", "grid", "qmc"])
def test_killed_again_and_again_no_trial_is_lost_or_done_twice(sampler: str, tmp_path: Path) -> None:
    path, folder = write(tmp_path, study(sampler)), tmp_path / "out"
    kill_often(sampler, fork_call, path, folder, KILLS)
    process = fork_call(path, folder)
    with ended(process):
        assert process.wait() == 0, process.stderr.read()
    check_all(path, folder, tmp_path)


def test_one_killed_alone_and_one_suspended_beside_the_command_line(tmp_path: Path) -> None:
    path, folder = write(tmp_path, study("random")), tmp_path / "out"
    kill_often("random, command line", start, path, folder, 2)
    kill_and_suspend(path, folder)
    check_all(path, folder, tmp_path)


def test_a_search_waits_for_one_that_was_suspended_while_it_wrote(tmp_path: Path) -> None:
    """The lock that a suspended worker would hold is held here, from the first trial on."""
    path, folder = write(tmp_path, study("random")), tmp_path / "out"
    process = start(path, folder)
    with ended(process):
        assert wait_until(lambda: bool(list(folder.glob("trials/*.json"))), process)
        with closing(sqlite3.connect(folder / "study.db", timeout=60, isolation_level=None)) as database:
            database.execute("BEGIN EXCLUSIVE")
            time.sleep(SUSPENDED)
            assert process.poll() is None, process.stderr.read()
            database.execute("ROLLBACK")
        assert process.wait(600) == 0, process.stderr.read()
    check_all(path, folder, tmp_path)


def check_all(path: Path, folder: Path, home: Path) -> None:
    """Hold the search against one that nothing disturbed, and every run against the same alone."""
    assert states(folder) == ["COMPLETE"] * TRIALS
    assert sorted(records(folder)) == list(range(TRIALS))
    for file in folder.glob("runs/*/metrics.jsonl"):
        assert [json.loads(line)["round"] for line in file.read_text("utf-8").splitlines()] == list(range(ROUNDS))
    session.run_study(checked_study.prepare_study(path), home / "through")
    assert outcome(folder) == outcome(home / "through")
    runs = sorted({name for record in records(folder).values() for name in record["runs"]})
    assert sorted(one.name for one in (folder / "runs").iterdir()) == runs
    for number, name in enumerate(runs):
        there, alone = folder / "runs" / name, home / f"alone{number}"
        session.run_study(checked_study.prepare_study(there / "config.toml"), alone)
        (same,) = (alone / "runs").iterdir()
        results = [timeless(json.loads((one / "result.json").read_text("utf-8"))) for one in (there, same)]
        for result in results:
            result.pop("id")
            result.pop("variant", None)
        assert results[0] == results[1]
        assert weights(folder, name) == weights(alone, same.name)
    print(f"{len(runs)} runs of {TRIALS} trials are the runs alone, bit for bit")
