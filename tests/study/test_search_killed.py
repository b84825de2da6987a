"""A search that is killed with SIGKILL, whole or one worker alone: no trial is lost or done twice, no bit changes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.study.examples import write
from tests.study.search_examples import records, run, searching
from tests.study.test_search import outcome, states

pytestmark = pytest.mark.exhaustive

TRIALS, KILLS = 8, 10


def study(sampler: str) -> dict[str, Any]:
    return searching({"sampler": sampler, "trials": TRIALS}, study={"name": "search", "seeds": [0, 1]})


def start(path: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "splitfed",
        "run",
        str(path),
        "--folder",
        str(folder),
        "--resume",
        "--workers",
        "2",
    ]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def workers_of(parent: int) -> list[int]:
    """Return the processes that `parent` has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(one) for one in children.read_text("utf-8").split()] if children.is_file() else []


def wait_for_workers(process: subprocess.Popen[bytes]) -> list[int]:
    for _ in range(6000):
        if process.poll() is not None:
            return []
        if len(found := workers_of(process.pid)) == 2:
            return found
        time.sleep(0.01)
    raise AssertionError("no workers came")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are read from /proc")
@pytest.mark.parametrize("sampler", ["qmc", "tpe"])
def test_killed_again_and_again_no_trial_is_lost_or_done_twice(sampler: str, tmp_path: Path) -> None:
    path, folder = write(tmp_path, study(sampler)), tmp_path / "out"
    dice = random.Random(5)
    for _ in range(KILLS):
        process = start(path, folder)
        if not wait_for_workers(process):
            break
        time.sleep(dice.uniform(1.0, 6.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert run(path, folder, "--resume", "--workers", "2") == 0
    assert states(folder) == ["COMPLETE"] * TRIALS
    assert sorted(records(folder)) == list(range(TRIALS))
    if sampler == "qmc":
        assert run(path, tmp_path / "through") == 0
        assert outcome(folder) == outcome(tmp_path / "through")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are read from /proc")
def test_the_trial_of_a_worker_that_is_killed_is_taken_again_in_the_same_call(tmp_path: Path) -> None:
    path, folder = write(tmp_path, study("random")), tmp_path / "out"
    process = start(path, folder)
    one, other = wait_for_workers(process)
    while not list((folder / "trials").glob("*.json")):
        time.sleep(0.05)
    os.kill(other, signal.SIGSTOP)
    os.kill(one, signal.SIGKILL)
    time.sleep(3)
    os.kill(other, signal.SIGCONT)
    assert process.wait() == 0
    assert states(folder) == ["COMPLETE"] * TRIALS
    assert run(path, tmp_path / "through") == 0
    assert outcome(folder) == outcome(tmp_path / "through")


def test_two_workers_share_the_search_and_find_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, searching({"sampler": "qmc", "trials": 4}))
    assert run(path, tmp_path / "one") == 0
    assert run(path, tmp_path / "two", "--workers", "2") == 0
    assert states(tmp_path / "two") == ["COMPLETE"] * 4
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
