"""A study from its file to runs that have been checked: everything but the training, and nothing that only it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from splitfed.data.dataset import Dataset
from splitfed.models.import_paths import Code
from splitfed.study.config import schema
from splitfed.study.config.grid import Grid, expand
from splitfed.study.config.mistakes import in_file_order
from splitfed.study.config.search import SearchStudy, read_search
from splitfed.study.config.static_check import check_statically
from splitfed.study.run.preflight import check_grid
from splitfed.study.run.search_check import check_search
from splitfed.study.run.trust import code_of, is_results

Json = dict[str, Any]


@dataclass(frozen=True)
class CheckedStudy:
    """A study that has been checked: its runs and its data; `text` as the user wrote it.

    `code`: where its import paths lead. `search`: what chooses the runs, of which `grid` then holds one setting alone;
    None for a grid.
    """

    grid: Grid
    data: Dataset
    text: str
    code: Code
    search: SearchStudy | None = None


def prepare_study(path: Path, advice: str | None = None, *, trust: bool = False) -> CheckedStudy:
    """Read and check the study in the file `path`: everything but the training; nothing is written.

    Import paths of models may lead to Python files beside it. One that lies in a folder of results is as much to be
    trusted as that folder: see `splitfed.study.run.trust`. `advice`: as `schema.read_toml`.
    """
    raw, base, code = read_study_file(path, advice, trust=trust)
    text = path.read_text("utf-8")
    if "search" in raw:
        check_statically(raw, path.name)
        with in_file_order(raw):
            search, first = read_search(raw, path.name, base, code)
            grid, data = check_search(search, first)
        return CheckedStudy(replace(grid, resolved=search.resolved(raw, grid)), data, text, code, search)
    grid, data = check_study(raw, path.name, base, code)
    return CheckedStudy(grid, data, text, code)


def read_study_file(path: Path, advice: str | None = None, *, trust: bool = False) -> tuple[Json, Path, Code]:
    """Return the tables in the file `path`, unchecked, where its paths start from and where its imports may lead."""
    raw, base = schema.read_toml(path, advice), path.resolve().parent
    # A file of a folder of results may be a link to one elsewhere.
    results = next(filter(is_results, (path.absolute().parent.resolve(), base)), None)
    return raw, base, Code(base) if results is None else code_of(results, raw, trust)


def check_study(raw: Mapping[str, Any], source: str, base: Path, code: Code | None = None) -> tuple[Grid, Dataset]:
    """Check the study `raw`, called `source` in messages; relative paths start from `base`.

    `code`: where import paths of models may lead (default: to the Python files in `base` as well).
    """
    check_statically(raw, source)
    with in_file_order(raw):
        grid = expand(schema.parse_study(raw, source), source, base, Code(base) if code is None else code)
        return check_grid(grid, source)
