"""The runs of a study as trials of Optuna, in an SQLite file: a queue that several processes can share.

Whether a run is finished is decided by its folder, who is at it by a lock that ends with its process
(`splitfed.study.run.ownership`). So the run of a worker that died is taken by the next one that looks, and that of a
worker that was suspended is left to it, however long that lasts. Only where it was suspended while it wrote to the file
do all others wait for it, for `LOCKED_SECONDS` at most.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from splitfed.core.digests import Damaged
from splitfed.core.errors import SplitfedError, describe_error
from splitfed.study.run import failures
from splitfed.study.run.ownership import MOST_DEATHS, Claim, Locks, LostRun

NAME = "study"
AGAIN = "delete it and go on with --resume: what is finished is kept in runs/"
OPEN = (TrialState.RUNNING, TrialState.WAITING)
LOCKED_SECONDS = 600.0
"""For how long a process waits for an SQLite file to which another one is writing, which may have been suspended."""


@contextmanager
def detect_damage(path: Path) -> Iterator[None]:
    """Say that the queue in the file `path` is damaged where the block cannot read it; raises `Damaged` then."""
    try:
        if path.is_file():
            with closing(sqlite3.connect(path.absolute(), timeout=LOCKED_SECONDS)) as database:
                found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise Damaged(path, AGAIN, " ".join(str(found).split()))
        yield
    except SplitfedError:
        raise
    except Exception as error:  # what a damaged file makes of the libraries that read it can be any error
        if failures.explain_failure(error) is not None:
            raise
        raise Damaged(path, AGAIN, describe_error(error)) from error


def open_database(path: Path) -> RDBStorage:
    """Open Optuna's storage in the SQLite file `path`, made if it is not there."""
    # A connection may be closed by another thread than the one that opened it.
    connect = partial(sqlite3.connect, path.absolute(), timeout=LOCKED_SECONDS, check_same_thread=False)
    # The address names no file: printed into it, a path with ?, %, # or a brace would name another one. Without a pool
    # every connection is closed when it was used.
    return RDBStorage("sqlite://", engine_kwargs={"creator": connect, "poolclass": NullPool})


def open_queue(path: Path, *, best: Literal["minimize", "maximize"] = "maximize") -> optuna.Study:
    """Open the queue in the file `path`, made if it is not there; `best`: "maximize" or "minimize" the utility."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        storage=open_database(path),
        sampler=optuna.samplers.RandomSampler(seed=0),
        study_name=NAME,
        direction=best,
        load_if_exists=True,
    )


def fill_queue(queue: optuna.Study, wanted: Sequence[str], names: Collection[str]) -> None:
    """Put every run in `wanted` that is not waiting into the queue; refuse a queue that holds others than `names`.

    Only for the one process that holds the study's lock: a trial that still counts as running was left by a crash.
    """
    waiting = set()
    for trial in queue.get_trials(deepcopy=False):
        if trial.state is TrialState.RUNNING:
            queue.tell(trial.number, state=TrialState.FAIL)
        elif trial.state is TrialState.WAITING:
            run = str(trial.user_attrs.get("run", ""))
            if run not in names or trial.system_attrs.get("fixed_params", {"run": run}) != {"run": run}:
                raise LookupError(f"it asks for a run {run!r}, which the study does not have")
            waiting.add(run)
    for name in wanted:
        if name not in waiting:
            queue.enqueue_trial({"run": name}, user_attrs={"run": name})


class HeldRun(NamedTuple):
    """A run that this process does: its name, the lock by which it holds it, and its trial in Optuna."""

    name: str
    claim: Claim
    trial: optuna.Trial


class RunQueue:
    """The runs called `names` in `queue`, taken and held by `locks`."""

    def __init__(self, queue: optuna.Study, names: Sequence[str], locks: Locks) -> None:
        self._queue, self._names, self._locks = queue, list(names), locks

    def take(self) -> HeldRun | None:
        """Return a run to do, first those whose worker died; None where all are done, held or left out."""
        with self._locks.turn():
            for trial in self._free():
                run = str(trial.user_attrs["run"])
                if (claim := self._locks.claim(run)) is None:
                    continue
                if trial.state is TrialState.WAITING:
                    self._queue._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
                taken = optuna.trial.Trial(self._queue, trial._trial_id)
                taken.suggest_categorical("run", self._names)
                return HeldRun(run, claim, taken)
        return None

    def tell(self, held: HeldRun, utility: float | None) -> None:
        """End the run with its `utility`, None for one that failed."""
        held.claim.check()
        if utility is None:
            self._queue.tell(held.trial.number, state=TrialState.PRUNED)
        else:
            self._queue.tell(held.trial.number, utility)
        held.claim.release()

    def has_work(self) -> bool:
        """Return whether there is a run for another worker to take."""
        with self._locks.turn():
            return any(not self._locks.is_held(str(trial.user_attrs["run"])) for trial in self._free())

    def left_out(self) -> list[str]:
        """Return the runs that are not done since as many workers as may have died at them."""
        runs = [str(trial.user_attrs["run"]) for trial in self._queue.get_trials(deepcopy=False, states=OPEN)]
        return [run for run in runs if self._locks.deaths(run) >= MOST_DEATHS]

    def _free(self) -> Iterator[FrozenTrial]:
        """Yield the trials that are not over, but for those at which too many workers have died."""
        for trial in self._queue.get_trials(deepcopy=False, states=OPEN):
            if self._locks.deaths(str(trial.user_attrs["run"])) < MOST_DEATHS:
                yield trial


def work_queue(queue: RunQueue, do: Callable[[HeldRun], float | None], lost: Callable[[str, LostRun], None]) -> None:
    """Take runs from the queue until there is none to take; `do(run)` returns the utility, None for one that failed.

    `lost(name, why)` is told of a run that another process has taken over meanwhile.
    """
    while (held := queue.take()) is not None:
        try:
            queue.tell(held, do(held))
        except LostRun as error:
            lost(held.name, error)
        finally:
            held.claim.release()
