"""A search from Python, trial by trial: `ask` what to try, do it in any way, `tell` what came out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, unknown
from splitfed.models.import_paths import NameResolver
from splitfed.study.config.search_space import describe
from splitfed.study.config.toml import dumps
from splitfed.study.report.data import Json
from splitfed.study.report.search_data import SearchOutcome, read_search_outcome
from splitfed.study.run.checked_study import check_raw
from splitfed.study.run.progress import Lines
from splitfed.study.run.search import (
    blank_record,
    do_trial,
    judge_metrics,
    read_record,
    write_missing_records,
    write_record,
)
from splitfed.study.run.search_queue import DrawnTrial, SearchQueue
from splitfed.study.run.session import check_folder, claim_folder


class SearchTrial:
    """A trial that was asked for: `number`, `parameters` by their places in the study, and `study`, its own tables."""

    def __init__(self, drawn: DrawnTrial, parameters: Json, study: Json) -> None:
        self.drawn, self.number = drawn, drawn.number
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
        home, self.folder, self._trust = Path(base).resolve(), Path(folder), trust
        self._ready = check_raw(study, "study", home, NameResolver(home), dumps(study), None)
        assert self._ready.search is not None
        self._search, self._data = self._ready.search, self._ready.data
        self._stack = ExitStack()

    def __enter__(self) -> SearchSession:
        check_folder(self._ready, self.folder, resume=True, workers=1, trust=self._trust)
        self._stack.enter_context(claim_folder(self._ready, self.folder, trust=self._trust))
        self._queue = SearchQueue(self._search, self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def ask(self) -> SearchTrial | None:
        """Return a trial to do, first those that were asked for and never told; None when all are done."""
        if (drawn := self._queue.take()) is None:
            return None
        tried = drawn.assignment
        return SearchTrial(drawn, describe(self._search.tree, tried), self._search.study_of(tried))

    def run(self, trial: SearchTrial) -> Json:
        """Do `trial` as `splitfed run` does, its runs in the folder, and return its record; it is told then."""
        record = do_trial(self._search, self._data, self.folder, trial.drawn, Lines(self._search.trials))
        self._queue.tell(trial.number, record)
        return record

    def tell(self, trial: SearchTrial, metrics: Mapping[str, float] | None = None, *, failed: str = "") -> Json:
        """End `trial` with the `metrics` of its objectives and constraints, or as one that `failed` for a reason.

        An infinite epsilon is one without a bound. Returns the record. Raises `InvalidInput` for a metric that the
        search does not know, that is missing, or that is no number, and for a trial that has been told.
        """
        if read_record(self.folder, trial.number) is not None:
            raise InvalidInput(f"trial {trial.number} has been told already")
        if (metrics is None) == (not failed):
            raise InvalidInput("expected the metrics of the trial, or failed='why'")
        record = blank_record(self._search, trial.drawn)
        if metrics is None:
            record |= {"reason": failed}
        else:
            record |= judge_metrics(self._search, self._read_metrics(metrics))
        write_record(self.folder, record)
        self._queue.tell(trial.number, record)
        return record

    @property
    def outcome(self) -> SearchOutcome:
        """All trials that are over, and the front."""
        write_missing_records(self.folder, self._queue)
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
