"""Several processes at the runs of one study: started, heard, and replaced where one dies before its work is done."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO

from splitfed.core.errors import InvalidInput, SplitfedError
from splitfed.study.run import failures
from splitfed.study.run.ownership import MOST_DEATHS
from splitfed.study.run.progress import StudyWatcher, Watcher, relay_event

PATIENCE = 2.0
"""Seconds that workers get to end by themselves."""


class WorkerDied(SplitfedError):
    """Worker processes end before they have begun anything."""


def run_workers(
    command: Sequence[str], count: int, lock: int | None, watcher: StudyWatcher, has_work: Callable[[], bool]
) -> None:
    """Keep `count` processes of `command` at work until none of them finds any; pass on what they report.

    For one that dies another is started, as long as `has_work()`: it takes up what was left. `lock`: a descriptor that
    they inherit. Raises `InvalidInput` for what a worker says of a mistake of the user's or a refusal of the machine,
    when all others have ended, and `WorkerDied` where workers die before they have begun anything.
    """
    ended: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    together = threading.Lock()
    alive: dict[int, Worker] = {}
    refusal, early = "", 0
    start = partial(_start, command, lock)
    try:
        for number in range(count):
            alive[number] = Worker(number, start(), watcher, together, ended)
        while alive:
            worker = ended.get()
            code = worker.process.wait()
            worker.close()
            del alive[worker.number]
            with together:
                watcher.gone(worker.number)
            if code == 0:
                continue
            why = _describe_end(code, worker.complaint)
            if code == 2:
                refusal = refusal or why
                continue
            if not worker.began:
                early += 1
                if early >= MOST_DEATHS:
                    raise WorkerDied(f"{early} workers ended before they began a run ({why}); go on with --resume")
            with together:
                watcher.note(_describe_death(worker, why))
            if has_work():
                alive[worker.number] = Worker(worker.number, start(), watcher, together, ended)
    except BaseException:
        failures.ignore_signals()
        stop_workers([worker.process for worker in alive.values()])
        for worker in alive.values():
            worker.close()
        raise
    if refusal:
        raise InvalidInput(refusal)


def _start(command: Sequence[str], lock: int | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=() if lock is None else (lock,),
    )


def _describe_end(code: int, complaint: str) -> str:
    """Return why a process ended early: the last line that it wrote, or by which signal."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    lines = complaint.splitlines()
    return lines[-1] if lines else f"exit code {code}"


def _describe_death(worker: Worker, why: str) -> str:
    what = f"worker {worker.number + 1} ended early ({why})"
    return f"{what}; {worker.run} is taken again" if worker.run else what


def stop_workers(workers: Sequence[subprocess.Popen[str]]) -> None:
    """End the workers: ask them, and do not wait for long."""
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


class Worker:
    """One process, with threads that read what it writes; it is put into `ended` after its end.

    `run`: what it is at, "" where that is nothing; `began`: whether it has begun any; `complaint`: what it wrote on
    standard error.
    """

    def __init__(
        self,
        number: int,
        process: subprocess.Popen[str],
        watcher: StudyWatcher,
        together: threading.Lock,
        ended: queue.SimpleQueue[Worker],
    ) -> None:
        self.number, self.process = number, process
        self.run, self.began, self.complaint = "", False, ""
        self._together = together
        with together:
            self._watcher: Watcher = watcher.worker(number)
        assert process.stdout is not None
        assert process.stderr is not None
        # Read all the time: a worker whose pipe is full would wait for ever.
        self._readers = {
            threading.Thread(target=self._read_events, args=(process.stdout,), daemon=True): process.stdout,
            threading.Thread(target=self._read_errors, args=(process.stderr,), daemon=True): process.stderr,
        }
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait, args=(ended,), daemon=True).start()

    def close(self) -> None:
        """Close its pipes after its end, unless a process that it had started still writes into them."""
        for reader, stream in self._readers.items():
            reader.join(PATIENCE)
            if not reader.is_alive():
                stream.close()

    def _wait(self, ended: queue.SimpleQueue[Worker]) -> None:
        self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE)
        ended.put(self)

    def _read_events(self, stream: IO[str]) -> None:
        for line in stream:
            with self._together:
                try:
                    event = relay_event(line, self._watcher)
                except ValueError:  # what a library prints, or what a worker that was killed has left of a line
                    continue
            if event["event"] == "start":
                self.run, self.began = str(event["run"]), True
            elif event["event"] == "finish":
                self.run = ""

    def _read_errors(self, stream: IO[str]) -> None:
        self.complaint = stream.read().strip()
