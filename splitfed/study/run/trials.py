"""The runs of a study as trials of Optuna, in an SQLite file: a queue that several processes can share.

Whether a run is finished is decided by its folder; the trials say who is at it. A worker that dies stops beating,
and its trial is put back into the queue by the next one that looks.
"""

from __future__ import annotations

import sqlite3
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState
from sqlalchemy.pool import NullPool

from splitfed.core.digests import Damaged
from splitfed.core.errors import SplitfedError
from splitfed.study.run import failures

if sys.platform != "win32":
    import fcntl

HEARTBEAT, GRACE, RETRIES = 10, 60, 3
NAME = "study"
AGAIN = "delete it and go on with --resume: what is finished is kept in runs/"


@contextmanager
def detect_damage(path: Path) -> Iterator[None]:
    """Say that the queue in the file `path` is damaged where the block cannot read it; raises `Damaged` then."""
    try:
        if path.is_file():
            with closing(sqlite3.connect(path.absolute())) as database:
                found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise Damaged(path, AGAIN, " ".join(str(found).split()))
        yield
    except SplitfedError:
        raise
    except Exception as error:  # what a damaged file makes of the libraries that read it can be any error
        if failures.explain_failure(error) is not None:
            raise
        raise Damaged(path, AGAIN, " ".join(str(error).split())[:200] or type(error).__name__) from error


def open_queue(path: Path, *, best: Literal["minimize", "maximize"] = "maximize") -> optuna.Study:
    """Open the queue in the file `path`, made if it is not there; `best`: "maximize" or "minimize" the utility."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # A connection may be closed by another thread than the one that opened it.
    connect = partial(sqlite3.connect, path.absolute(), timeout=60, check_same_thread=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        storage = RDBStorage(
            # The address names no file: printed into it, a path with ?, %, # or a brace would name another one.
            "sqlite://",
            # Without a pool every connection is closed when it was used, also by the thread that beats.
            engine_kwargs={"creator": connect, "poolclass": NullPool},
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=RETRIES),
        )
        return optuna.create_study(
            storage=storage,
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


def work_queue(queue: optuna.Study, names: Sequence[str], do: Callable[[str], float | None], turn: Path) -> None:
    """Take runs from the queue until none waits; `do(run)` returns the utility, or None for a run that failed.

    `turn`: a lock file. SQLite cannot lock one row, so two processes that take a trial at the same moment may get
    the same one; they take turns at it.
    """

    def take() -> bool:
        """Start one trial; False if none waits."""
        with turn.open("w") as file, ExitStack() as held:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX)
                held.callback(fcntl.flock, file, fcntl.LOCK_UN)
            if not queue.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                return False

            def objective(trial: optuna.Trial) -> float:
                held.close()  # The trial is ours: the next process may take one.
                if (value := do(str(trial.suggest_categorical("run", names)))) is None:
                    raise optuna.TrialPruned
                return value

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                queue.optimize(objective, n_trials=1)
            return True

    while take():
        pass
