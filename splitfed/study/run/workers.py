"""Several processes at the jobs of one study: they get one at a time, report, and are replaced where they die.

The process that starts them decides alone who does what: a job is at one worker until that says it is done or ends,
however long it is suspended, and then goes to another one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from threading import Thread
from typing import Any, NamedTuple

from splitfed.core.errors import InvalidInput, SplitfedError
from splitfed.study.run import failures
from splitfed.study.run.progress import ProgressEvent, StudyWatcher, Watcher

PATIENCE = 2.0
"""Seconds that workers get to end by themselves, and after which it is looked whether one that is silent lives."""

MOST_DEATHS = 3
"""How many workers may die at one job in one call; then it is left out."""

DONE = "done"
"""The event by which a worker says that its job is done."""


class WorkerDied(SplitfedError):
    """Worker processes end before they have begun anything."""


class Job(NamedTuple):
    """What one worker does at a time: a run or a trial by its `name`, and what else it needs, as plain values."""

    name: str
    value: Any = None


class Parent:
    """The process that has started this one, at the other end of `channel`, a descriptor; hands it jobs."""

    def __init__(self, channel: int) -> None:
        self._connection = Connection(channel)
        self.reports = Watcher(self._tell)

    def jobs(self) -> Iterator[Job]:
        """Yield jobs until there are none, or the other process has ended; each is done when the next is asked for."""
        with suppress(EOFError, ConnectionError):
            while (found := json.loads(self._connection.recv_bytes())) is not None:
                yield Job(*found)
                self._tell({"event": DONE})

    def _tell(self, event: ProgressEvent) -> None:
        self._connection.send_bytes(json.dumps(event).encode())


class Worker:
    """A process of `command` with its first `job`; `lock`: a descriptor that it inherits.

    `watcher`: receives what it reports; `began`: whether it has reported anything.
    """

    def __init__(self, number: int, command: Sequence[str], lock: int | None, job: Job, watcher: Watcher) -> None:
        self.number, self.watcher, self.began = number, watcher, False
        self.connection, there = Pipe()
        self.give(job)
        with there:
            channel = there.fileno()
            self.process = _start([*command, str(channel)], [channel] if lock is None else [channel, lock])
        self._last = deque[str](maxlen=1)
        # Read all the time: a worker whose pipe is full would wait for ever.
        self._reader = Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def give(self, job: Job | None) -> None:
        """Hand it the next job; None ends it."""
        self.job = job
        with suppress(ConnectionError):  # that it has died is seen when it is received from
            self.connection.send_bytes(json.dumps(job).encode())

    def receive(self) -> ProgressEvent | None:
        """Return the next event; None where it has ended."""
        try:
            event: ProgressEvent = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        self.began = True
        return event

    def has_ended(self) -> bool:
        """Return whether it has ended with nothing left to receive, though a process that it had started lives on."""
        return self.process.poll() is not None and not self.connection.poll()

    def close(self) -> str:
        """Wait for its end; return why it ended early: its last line on standard error, or by which signal."""
        code = self.process.wait()
        self.connection.close()
        self._reader.join(PATIENCE)  # a process that it had started may still write
        if code < 0:
            return f"killed by {_name_signal(-code)}"
        return self._last[0].strip() if self._last else f"exit code {code}"

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self._last.extend(filter(str.strip, lines))


class Workers:
    """Processes of `command` that do `jobs` and report to `watcher`; `done` is told of every job that is over.

    `lock`: a descriptor that they inherit.
    """

    def __init__(
        self,
        command: Sequence[str],
        lock: int | None,
        watcher: StudyWatcher,
        jobs: Iterator[Job],
        done: Callable[[Job], None],
    ) -> None:
        self._command, self._lock, self._watcher, self._jobs, self._done = command, lock, watcher, jobs, done
        self._alive: list[Worker] = []
        self._again: list[Job] = []
        self._deaths: Counter[str] = Counter()
        self._early, self._refusal = 0, ""

    def run(self, count: int) -> None:
        """Keep `count` of them at work until no job is left; one that dies is replaced, and its job taken again.

        A job at which `MOST_DEATHS` have died is left out, and said to be. Raises `InvalidInput` for what a worker
        says of a mistake of the user's or a refusal of the machine, when all others have ended, and `WorkerDied` where
        workers die before they have begun anything.
        """
        try:
            for number in range(count):
                self._start_worker(number)
            while self._alive:
                ready = wait([worker.connection for worker in self._alive], PATIENCE)
                for worker in list(self._alive):
                    if worker.connection in ready:
                        self._follow(worker, worker.receive())
                    elif worker.has_ended():
                        self._replace(worker)
        except BaseException:
            failures.ignore_signals()
            stop_workers([worker.process for worker in self._alive])
            for worker in self._alive:
                worker.close()
            raise
        if self._refusal:
            raise InvalidInput(self._refusal)

    def _start_worker(self, number: int) -> None:
        """Start the worker with this number, where there is a job for it."""
        if (job := self._next_job()) is not None:
            watcher = self._watcher.worker(number)
            self._alive.append(Worker(number, self._command, self._lock, job, watcher))

    def _next_job(self) -> Job | None:
        return self._again.pop() if self._again else next(self._jobs, None)

    def _follow(self, worker: Worker, event: ProgressEvent | None) -> None:
        """Do what an event of `worker` asks for; None: it has ended."""
        if event is None:
            self._replace(worker)
        elif event["event"] == DONE:
            assert worker.job is not None
            self._done(worker.job)
            worker.give(self._next_job())
        else:
            worker.watcher.tell(event)

    def _replace(self, worker: Worker) -> None:
        """Start another worker in place of one that has ended, unless it had nothing left to do or was refused."""
        self._alive.remove(worker)
        why, job = worker.close(), worker.job
        self._watcher.gone(worker.number)
        if job is None:
            return
        if worker.process.returncode == 2:
            self._refusal = self._refusal or why
            self._again.append(job)
            return
        if worker.began:
            self._deaths[job.name] += 1
        else:
            self._early += 1
            if self._early >= MOST_DEATHS:
                raise WorkerDied(f"{self._early} workers ended before they began a run ({why}); go on with --resume")
        self._watcher.note(f"worker {worker.number + 1} ended early ({why}); {self._take_again(job)}")
        self._start_worker(worker.number)

    def _take_again(self, job: Job) -> str:
        """Have `job` done again, unless too many have died at it; return what becomes of it, in words."""
        if self._deaths[job.name] < MOST_DEATHS:
            self._again.append(job)
            return f"{job.name} is taken again"
        return f"{job.name} is left out: {MOST_DEATHS} workers died at it; go on with --resume to try it again"


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


def _start(command: Sequence[str], inherited: Sequence[int]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=tuple(inherited),
    )


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
