"""Trains a finished run of a study for more rounds, with the result of a run that had them all from the start.

Weights, metrics and messages of the rounds it has stay; what was measured after the last of them is measured anew after
the last one now, and every attack runs again. `previous.json` keeps the earlier result until then, so that a
continuation that was interrupted goes on by the same command, or with its study.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from splitfed.core import digests
from splitfed.core.defense import privacy_event
from splitfed.core.errors import InvalidInput, check_count
from splitfed.data.dataset import Dataset
from splitfed.study.config import schema
from splitfed.study.config.run_spec import RunSpec
from splitfed.study.config.toml import dumps
from splitfed.study.report.document import write_report
from splitfed.study.results import LABELS, RunResult, read_result, result_from_json, write_result
from splitfed.study.run.progress import Lines, open_watcher
from splitfed.study.run.reattack import load_finished_run, open_cell, rewrite_results_table
from splitfed.study.run.runner import run_cell, train_cell, with_rounds
from splitfed.study.run.store import StudyFolder, hold_run, study_of
from splitfed.study.trust import MARK, check_links, read_own_files, write_mark
from splitfed.training.checkpoint import make_folder, write_atomic
from splitfed.training.folder import RunFolder

PREVIOUS = "previous.json"


def continue_run(folder: Path, rounds: int, *, trust: bool = False) -> RunResult:
    """Train the finished run in `folder` for `rounds` more rounds and return its new result; tables and report follow.

    Raises `InvalidInput`, before anything is changed, for a run that a callback has ended, for a trial of a search, and
    where the length was part of what was worked out: see `Run.continue_training`.
    """
    check_count("rounds", rounds, low=1)
    with _alone(folder, trust):
        started = _read_interrupted(folder, rounds)
        # What is trusted for one call is not the user's own for ever.
        own = (folder / "config.toml").is_file() and read_own_files(folder) is not None
        previous, cell, data = (
            _begin(folder, rounds, trust) if started is None else (started, *open_cell(folder, trust))
        )
        with open_watcher(1, 0) as workers:
            watcher = workers.worker(0)
            watcher.start(folder.resolve().name)
            result = run_cell(cell, data, folder, watcher)
        # Labels say more than the configuration that the folder keeps, such as that a cut was chosen.
        labels = {key: getattr(previous, key) for key in LABELS}
        result = write_result(folder, replace(result, **labels))
        if not own:
            (folder / MARK).unlink(missing_ok=True)
        (folder / PREVIOUS).unlink(missing_ok=True)
        home = study_of(folder)
        if home is not None:
            rewrite_results_table(folder)
            if result.failed is None:
                write_report(home, trust=trust)
    return result


def _begin(folder: Path, rounds: int, trust: bool) -> tuple[RunResult, RunSpec, Dataset]:
    """Check everything, and turn the finished run into one that has yet to get its last rounds."""
    previous, cell, data = load_finished_run(folder, trust=trust)
    home = study_of(folder)
    if home is not None and "search" in schema.read_toml(home / "config.toml", digests.STUDY_CONFIG):
        raise InvalidInput(
            f"{str(folder)!r} is a trial of a search, which has chosen by its result; do it again by itself: "
            f"splitfed run {folder / 'config.toml'}"
        )
    run = train_cell(cell, data, folder, Lines(1))
    run.plan_more(rounds)
    total = len(run.history) + rounds
    done, every = len(run.history), cell.training.evaluate_every
    if done % every and any(privacy_event(defense) is not None for defense in run.engine.defenses):
        raise InvalidInput(
            f"rows were scored after round {done} because it was the last (evaluate_every={every}), which no ledger "
            "planned for more rounds counts; train the run again with more"
        )
    longer = with_rounds(cell, total)
    sources = read_own_files(folder)
    make_folder(folder / "attacks")
    # In this order what an interruption leaves is known for what it is.
    (folder / "result.json").replace(folder / PREVIOUS)
    shutil.rmtree(folder / "attacks", ignore_errors=True)
    RunFolder(folder).lengthen(total)
    write_atomic(folder / "config.toml", digests.toml_with_digest(dumps(longer.config)))
    if sources is not None:
        write_mark(folder, sources)
    return previous, longer, data


def _read_interrupted(folder: Path, rounds: int) -> RunResult | None:
    """Return the earlier result of a run whose continuation was interrupted; None of one that is whole."""
    kept = folder / PREVIOUS
    if not kept.is_file() or read_result(folder) is not None:
        return None
    previous = result_from_json(digests.read(kept, digests.REMEASURE), folder)
    asked = int(RunFolder(folder).read_definition()["rounds"]) - previous.rounds
    if asked == 0:  # nothing but the result was put aside
        kept.replace(folder / "result.json")
        return None
    if asked != rounds:
        raise InvalidInput(f"{str(folder)!r} was being continued by {asked} rounds: finish that by --rounds {asked}")
    return previous


@contextmanager
def _alone(folder: Path, trust: bool) -> Iterator[None]:
    """Keep other processes off the run in `folder`, and off the study that it belongs to, where there is one."""
    home = study_of(folder)
    if not folder.is_dir():
        raise InvalidInput(f"{str(folder)!r} holds no finished run; expected a folder .../runs/NAME")
    if not trust:  # a lock is a file that is written
        check_links(home or folder)
    with nullcontext() if home is None else StudyFolder(home).lock(), hold_run(folder):
        yield
