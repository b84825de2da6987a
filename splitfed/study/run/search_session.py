"""A search from Python, trial by trial: `ask` what to try, do it in any way, `tell` what came out."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, unknown
from splitfed.models.import_paths import Code
from splitfed.study.config.search import read_search
from splitfed.study.config.search_space import describe
from splitfed.study.config.toml import dumps
from splitfed.study.report.data import Json
from splitfed.study.report.search_data import SearchOutcome, read_search_outcome
from splitfed.study.run.progress import Lines
from splitfed.study.run.search import (
    blank_record,
    collect_records,
    do_trial,
    judge_metrics,
    open_search,
    read_record,
    write_record,
)
from splitfed.study.run.search_check import check_search
from splitfed.study.run.search_queue import TrialInHand
from splitfed.study.run.store import StudyFolder
from splitfed.study.run.trials import check_search_database
from splitfed.study.run.trust import write_mark
from splitfed.training.description import data_digest


class SearchTrial:
    """A trial that was asked for: `number`, `parameters` by their places in the study, and `study`, its own tables."""

    def __init__(self, hand: TrialInHand, parameters: Json, study: Json) -> None:
        self.hand, self.number = hand, hand.number
        self.parameters, self.study = parameters, study

    def __repr__(self) -> str:
        return f"SearchTrial({self.number}, {self.parameters})"


@guard_constructor
class SearchSession:
    """A search in `folder`, to be used in a `with` block: no other process works in the folder meanwhile.

    `study`: the tables of a study with `[search]`, as TOML gives them; relative paths start from `base`, where Python
    files of the study's import paths lie too. A folder that holds this search is gone on with. Raises `InvalidInput`
    for every mistake at once, for a folder that holds something else, and for one that is not this user's own and holds
    a database, unless `trust` is given.
    """

    def __init__(
        self, study: Mapping[str, Any], folder: str | Path, *, base: str | Path = ".", trust: bool = False
    ) -> None:
        if "search" not in study:
            raise InvalidInput("the study has no table [search]; expected one with objectives")
        code, self.folder = Code(Path(base).resolve()), Path(folder)
        self._search, first = read_search(study, "study", Path(base).resolve(), code)
        _, grid, self._data = check_search(self._search, first)
        self._grid = replace(grid, resolved=self._search.resolved(study, grid))
        self._text, self._code, self._trust = dumps(study), code, trust
        self._stack = ExitStack()

    def __enter__(self) -> SearchSession:
        home = StudyFolder(self.folder)
        rows = data_digest(self._data)
        home.check(self._grid, rows, resume=True)
        check_search_database(self.folder, self._trust)
        self._stack.enter_context(home.lock())
        home.claim(self._grid, self._text, rows)
        if not self._trust:
            write_mark(self.folder, self._code.sources(), tomllib.loads(self._text))
        self._queue = open_search(self._search, self.folder)
        self._stack.callback(self._queue.release)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def ask(self) -> SearchTrial | None:
        """Return a trial to do, first those that were asked for and never told; None when all are done."""
        if (hand := self._queue.take()) is None:
            return None
        return SearchTrial(hand, describe(self._search.tree, hand.assignment), self._search.study_of(hand.assignment))

    def run(self, trial: SearchTrial) -> Json:
        """Do `trial` as `splitfed run` does, its runs in the folder, and return its record; it is told then."""
        given = (self._search, self._data, self.folder, self._queue, trial.hand, Lines(self._search.trials))
        return do_trial(*given)

    def tell(self, trial: SearchTrial, metrics: Mapping[str, float] | None = None, *, failed: str = "") -> Json:
        """End `trial` with the `metrics` of its objectives and constraints, or as one that `failed` for a reason.

        An infinite epsilon is one without a bound. Returns the record. Raises `InvalidInput` for a metric that the
        search does not know, that is missing, or that is no number, and for a trial that has been told.
        """
        if read_record(self.folder, trial.number) is not None:
            raise InvalidInput(f"trial {trial.number} has been told already")
        if (metrics is None) == (not failed):
            raise InvalidInput("expected the metrics of the trial, or failed='why'")
        record = blank_record(self._search, trial.hand)
        if metrics is None:
            record |= {"reason": failed}
        else:
            record |= judge_metrics(self._search, self._read_metrics(metrics))
        write_record(self.folder, record)
        self._queue.tell(trial.hand, record)
        return record

    @property
    def outcome(self) -> SearchOutcome:
        """All trials that are over, and the front."""
        collect_records(self.folder, self._queue)
        found = read_search_outcome(self.folder)
        assert found is not None
        return found

    def _read_metrics(self, metrics: Mapping[str, float]) -> dict[str, Json]:
        known = self._search.metrics
        for name in metrics:
            if name not in known:
                raise unknown("metric", name, known)
        for name, metric in known.items():
            if name not in metrics:
                raise InvalidInput(f"metric {name!r} is missing; expected {', '.join(known)}")
            unbounded = metrics[name] == math.inf and metric.without_bound
            if not unbounded and not math.isfinite(metrics[name]):
                raise InvalidInput(f"metric {name}={metrics[name]} is not allowed; expected a number")
        return {
            name: {
                "mean": value if math.isfinite(value) else None,
                "low": None,
                "high": None,
                "n": 1,
                "over": "nothing",
            }
            for name, value in ((name, float(metrics[name])) for name in known)
        }
