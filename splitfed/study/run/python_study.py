"""Studies from Python: one built from tables as in TOML, and the results of one, as frames and as runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from splitfed.core import digests
from splitfed.core.argument_kinds import guard_class
from splitfed.core.errors import InvalidInput, check_count, check_path, unknown
from splitfed.drawing.html_table import html_table
from splitfed.models.import_paths import NameResolver
from splitfed.study.config.toml import dumps
from splitfed.study.report import planned_costs
from splitfed.study.report.data import read_refused
from splitfed.study.report.document import write_report
from splitfed.study.report.search_data import SearchOutcome, read_search_outcome
from splitfed.study.report.units import count_noun
from splitfed.study.results import RunResult, read_result
from splitfed.study.run.checked_study import CheckedStudy, check_raw
from splitfed.study.run.compare import compare
from splitfed.study.run.comparison import Comparison
from splitfed.study.run.loading import load
from splitfed.study.run.results_csv import table_rows, trials_frame
from splitfed.study.run.runner import Json
from splitfed.study.run.search_plan import describe_dimensions, plan_search
from splitfed.study.run.session import run_study
from splitfed.study.run.terminal_table import setting_rows
from splitfed.training.checkpoint import write_atomic
from splitfed.training.frames import round_row
from splitfed.training.run import Run

if TYPE_CHECKING:
    import pandas as pd

THREADS = "OMP_NUM_THREADS"
"""Environment variable by which a user says how many threads a process computes with."""
LISTS = ("topology", "method", "defense", "attack", "callback")
"""Tables of which a study may have several."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread inside the block, unless `THREADS` is set."""
    before = torch.get_num_threads()
    try:
        if THREADS not in os.environ:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


@guard_class
@dataclass(frozen=True)
class PreparedStudy:
    """A study that has been checked, as `splitfed run` would do it; made by `splitfed.study`."""

    checked: CheckedStudy

    @property
    def name(self) -> str:
        """What it is called."""
        return self.checked.grid.name

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of its runs, in the order they are done; none for a search, whose runs are chosen on the way."""
        return () if self.checked.search is not None else tuple(cell.id for cell in self.checked.grid.cells)

    @property
    def trials(self) -> int | None:
        """How many trials its search has; None for a grid."""
        return None if self.checked.search is None else self.checked.search.trials

    @property
    def toml(self) -> str:
        """The study as a TOML file for `splitfed run`."""
        return self.checked.text

    def save(self, path: str | Path) -> None:
        """Write the study into the file `path`; raises `InvalidInput` for a folder, and where none can be written."""
        check_path("path", path)
        target = Path(path)
        if target.is_dir():
            raise InvalidInput(f"path={str(path)!r} is a folder; expected a file")
        try:
            write_atomic(target, self.toml.encode())
        except OSError as error:
            raise InvalidInput(f"path={str(path)!r} cannot be written ({error.strerror}); give another") from None

    def plan(self, schedules: str | Sequence[str] = ()) -> Json:
        """Return what `splitfed plan --json` prints: bytes, operations, memory, time and epsilon; nothing is trained.

        `schedules`: others to set beside the study's own; "all" for every one. Of a search, what it varies and about
        how long it takes stands under "search", and the costs are those of one setting.
        """
        others = planned_costs.check_schedule_names(schedules)
        grid, data, search = self.checked.grid, self.checked.data, self.checked.search
        planned = planned_costs.plan_study(grid, data, others)
        return planned if search is None else {**planned, "search": plan_search(search, grid.cells, data)}

    def run(self, folder: str | Path | None = None, *, resume: bool = False, workers: int = 1) -> StudyResults:
        """Do all runs that have no result yet in `folder` (default: the study's name), and return the results.

        As `splitfed run`, without its report: `StudyResults.report` writes that. Of a search, its trials are done, and
        `StudyResults.search` has what they found. `workers`: processes, >= 1. It computes on one thread, as the command
        does, unless the environment variable OMP_NUM_THREADS says otherwise: sums by several threads end in other bits.
        """
        check_count("workers", workers, low=1)
        home = Path(self.name if folder is None else folder)
        with _one_thread():
            run_study(self.checked, home, resume=resume, workers=workers)
        return load_study(home)

    def __repr__(self) -> str:
        """Tell in a line what it is called and how many runs or trials it has."""
        size = count_noun(len(self.runs), "run") if self.trials is None else count_noun(self.trials, "trial")
        return f"PreparedStudy({self.name}, {size})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook: of the runs, or of what a search varies."""
        if self.checked.search is not None:
            varied = describe_dimensions(self.checked.search)
            return html_table(repr(self), ("parameter", "values"), list(varied.items()))
        rows = [
            (cell.id, cell.topology.label, cell.defense.label, cell.schedule.label, cell.seed)
            for cell in self.checked.grid.cells
        ]
        return html_table(repr(self), ("run", "topology", "defense", "schedule", "seed"), rows)


@guard_class
@dataclass(frozen=True)
class StudyResults:
    """What the runs of a study in `folder` came to; each call reads what is there by then."""

    folder: Path
    trust: bool = False

    @property
    def results(self) -> tuple[RunResult, ...]:
        """The result of every run that has ended, failed ones too, by name of the run."""
        found = (read_result(path, path.name) for path in sorted((self.folder / "runs").glob("*/")))
        return tuple(one for one in found if one is not None)

    @property
    @digests.reads_folder
    def runs(self) -> tuple[str, ...]:
        """The names of the runs that have ended with a result; those that failed stand in `failed`."""
        return tuple(found.id for found in self.results if found.failed is None)

    @property
    @digests.reads_folder
    def failed(self) -> dict[str, str]:
        """The runs that failed, and why, in a line."""
        return {found.id: found.failed for found in self.results if found.failed is not None}

    @property
    @digests.reads_folder
    def refused(self) -> dict[str, str]:
        """The runs that were left out as they cannot be put together (`skip_refused`), and why, in a line."""
        return dict(read_refused(self.folder))

    @property
    @digests.reads_folder
    def search(self) -> SearchOutcome | None:
        """What the trials of a search have found: their records, and those on the front; None for a grid."""
        return read_search_outcome(self.folder)

    @digests.reads_folder
    def trials_frame(self) -> pd.DataFrame:
        """Return the trials of a search as a pandas table, as in trials.csv; raises `InvalidInput` for a grid."""
        if (found := self.search) is None:
            raise InvalidInput(f"{str(self.folder)!r} holds a grid, without trials; expected a study with [search]")
        return trials_frame(found.records, found.front)

    @digests.reads_folder
    def frame(self, rounds: bool = False) -> pd.DataFrame:
        """Return the results as a pandas table: a row a run and attack, as in results.csv.

        With `rounds` a row a run and round instead, the columns of `Run.to_frame` behind those that name the run.
        """
        # pandas takes half a second to import.
        import pandas as pd

        if not rounds:
            return pd.DataFrame([row for found in self.results for row in table_rows(found)])
        named = ("topology_label", "defense_label", "schedule", "method", "seed")
        rows = []
        for found in self.results:
            if found.failed is None:
                first = next(table_rows(found))
                about = {"run": found.id, **{name: first[name] for name in named}}
                rows += [{**about, **round_row(entry)} for entry in found.history]
        return pd.DataFrame(rows)

    def load(self, run: str) -> Run:
        """Return one of the `runs` as it was, ready to be attacked, evaluated and continued; see `splitfed.load`."""
        if run not in (names := self.runs):
            raise unknown("run", run, names)
        return load(self.folder / "runs" / run, trust=self.trust)

    def compare(self, *others: str | Path | StudyResults, **options: Any) -> Comparison:
        """Compare settings of this study, or this study with `others`; `options` are those of `splitfed.compare`."""
        further = [one.folder if isinstance(one, StudyResults) else one for one in others]
        return compare(self.folder, *further, **{"trust": self.trust, **options})

    def report(self) -> Path:
        """Write the report, one self-contained page, and return its path."""
        return write_report(self.folder, trust=self.trust)

    def __repr__(self) -> str:
        """Tell in a line where it is and how many runs have ended."""
        lost = f", {len(failed)} failed" if (failed := self.failed) else ""
        return f"StudyResults({str(self.folder)!r}, {count_noun(len(self.runs), 'run')}{lost})"

    @digests.reads_folder
    def _repr_html_(self) -> str:
        """Return a table for a notebook: a row a setting, means over its seeds."""
        rows = setting_rows(self.results)
        attacks = list(dict.fromkeys(name for row in rows for name in row.get("attacks", {})))
        cells = [
            (
                *(row["topology"], row["defense"], row["seeds"], row.get("utility"), row.get("epsilon")),
                *(_first_score(row.get("attacks", {}).get(name, {})) for name in attacks),
            )
            for row in rows
        ]
        return html_table(repr(self), ("topology", "defense", "seeds", "utility", "epsilon", *attacks), cells)


def study(name: str = "study", *, seeds: Sequence[int] = (0,), base: str | Path = ".", **tables: Any) -> PreparedStudy:
    """Return the study that a TOML file with these tables would be, checked as a whole; nothing is written.

    `tables`: by the keys of the file, `data={...}`, `model={...}`, `training={...}`, `topology=[...]`,
    `defense=[...]`, `attack=[...]` and so on; a name alone stands for a table with that `name`, one table for a list of
    one; `search={...}` makes it a search. `base`: where relative paths start, and whose Python files import paths may
    lead to. Raises `InvalidStudy` with a line a mistake.
    """
    own = tables.pop("study", {})
    if not isinstance(own, Mapping):
        raise InvalidInput(f"study={own!r} is not allowed; expected a table, such as {{'target': 0.9}}")
    raw = {"study": {"name": name, "seeds": _plain(seeds), **_plain(own)}}
    raw |= {key: _table(key, value) for key, value in tables.items() if value is not None}
    home = Path(base).resolve()
    return PreparedStudy(check_raw(raw, "study", home, NameResolver(home), dumps(raw), None))


def load_study(folder: str | Path, *, trust: bool = False) -> StudyResults:
    """Return the results of the study in `folder`; nothing is imported or trained.

    `trust`: whether `StudyResults.load` may follow import paths and read files that a folder of somebody else names.
    Raises `InvalidInput` where there is no study.
    """
    home = Path(folder)
    if not (home / "study.toml").is_file() or not (home / "runs").is_dir():
        raise InvalidInput(f"{str(folder)!r} holds no study; expected a folder that `splitfed run` has written")
    return StudyResults(home, trust)


def _table(key: str, value: Any) -> Any:
    """Return a table as TOML has it, from what Python may give in its place."""
    if key in LISTS:
        found = [value] if isinstance(value, (str, Mapping)) else value
        return [_named(one) for one in found] if isinstance(found, (list, tuple)) else found
    if key == "model" and isinstance(value, (list, tuple)):
        return [_named(one) for one in value]
    return _named(value) if key in ("data", "model") else _plain(value)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else _plain(value)


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(key): _plain(one) for key, one in value.items()}
        case list() | tuple() | range():
            return [_plain(one) for one in value]
        case Path():
            return str(value)
    # Numbers, arrays and tensors of NumPy and torch.
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _first_score(scores: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return the attack's own mean in its first metric, for people."""
    found = next(((metric, by["attack"]) for metric, by in scores.items() if "attack" in by), None)
    return None if found is None else f"{found[0]} {found[1]:.3g}"
