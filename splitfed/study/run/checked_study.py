"""A study from its file to runs that have been checked: everything but the training, and nothing that only it needs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from splitfed.data.dataset import Dataset
from splitfed.models.import_paths import NameResolver
from splitfed.study.config import build, schema
from splitfed.study.config.grid import Grid, expand
from splitfed.study.config.mistakes import InvalidStudy, Mistakes, in_file_order, place_of, remove_key
from splitfed.study.config.search import SearchStudy, read_search
from splitfed.study.config.search_space import Assignment
from splitfed.study.config.table_check import check_tables
from splitfed.study.run.preflight import check_grid, name_auto_cuts
from splitfed.study.run.search_check import check_search
from splitfed.study.trust import code_of, is_results, key_of, recall

Json = dict[str, Any]


@dataclass(frozen=True)
class CheckedStudy:
    """A study that has been checked: its runs and its data; `text` as the user wrote it.

    `code`: where its import paths lead. `search`: what chooses the runs, of which `grid` then holds one setting alone,
    that of `setting`; None for a grid. `key`: of what was checked, "" for that of the grid.
    """

    grid: Grid
    data: Dataset
    text: str
    code: NameResolver
    search: SearchStudy | None = None
    setting: Assignment | None = None
    key: str = ""


def prepare_study(
    path: Path, advice: str | None = None, *, trust: bool = False, folder: Path | None = None
) -> CheckedStudy:
    """Read and check the study in the file `path`: everything but the training; nothing is written.

    Import paths of models may lead to Python files beside it. One that lies in a folder of results is as much to be
    trusted as that folder: see `splitfed.study.trust`. `advice`: as `schema.read_toml`. `folder`: of results, where
    an earlier call may have left what it has checked.
    """
    raw, base, code = read_study_file(path, advice, trust=trust)
    return check_raw(raw, path.name, base, code, path.read_text("utf-8-sig"), folder)


def folder_named_after(path: Path) -> Path | None:
    """Return the folder that is called like the study in the file `path`; None where it has no such name."""
    table = schema.read_toml(path).get("study")
    name = table.get("name") if isinstance(table, Mapping) else None
    return Path(name) if isinstance(name, str) and name else None


def read_study_file(path: Path, advice: str | None = None, *, trust: bool = False) -> tuple[Json, Path, NameResolver]:
    """Return the tables in the file `path`, unchecked, where its paths start from and where its imports may lead."""
    raw, base = schema.read_toml(path, advice), path.resolve().parent
    # A file of a folder of results may be a link to one elsewhere.
    results = next(filter(is_results, (path.absolute().parent.resolve(), base)), None)
    return raw, base, NameResolver(base) if results is None else code_of(results, raw, trust)


def check_study(
    raw: Mapping[str, Any], source: str, base: Path, code: NameResolver | None = None
) -> tuple[Grid, Dataset]:
    """Check the study `raw`, called `source` in messages; relative paths start from `base`.

    `code`: where import paths of models may lead (default: to the Python files in `base` as well).
    """
    code = NameResolver(base) if code is None else code
    check_all_tables(raw, source, base, code)
    with in_file_order(raw):
        return check_grid(expand(schema.parse_study(raw, source), source, base, code), source)


def check_all_tables(raw: Mapping[str, Any], source: str, base: Path, code: NameResolver) -> None:
    """Raise `InvalidStudy` where keys of tables or names are wrong, with all that is wrong with values beside them."""
    try:
        check_tables(raw, source)
    except InvalidStudy as error:
        mistakes = Mistakes(source)
        mistakes.take_lines(error.lines, error.more)
        mistakes.take_lines(mistakes_in_values(raw, source, base, code, error))
        with in_file_order(raw):
            mistakes.stop()


def mistakes_in_values(
    raw: Mapping[str, Any], source: str, base: Path, code: NameResolver, known: InvalidStudy
) -> list[str]:
    """Return what else is wrong with the study `raw`, of which mistakes in keys and names are `known`, a line each.

    It is read without the keys that are wrong; where that leaves no study, the known mistakes have to be mended first.
    """
    if known.more:
        return []  # those that are not shown would come back as new ones
    rest, told = copy.deepcopy(dict(raw)), {place_of(line) for line in known.lines}
    for place in told:
        if not place.endswith(".name"):
            remove_key(rest, place)
    try:
        if "search" in rest:
            read_search(rest, source, base, code)
        else:
            expand(schema.parse_study(rest, source), source, base, code)
    except InvalidStudy as error:
        return [line for line in error.lines if place_of(line) not in told]
    return []


def check_raw(
    raw: Mapping[str, Any], source: str, base: Path, code: NameResolver, text: str, folder: Path | None, token: str = ""
) -> CheckedStudy:
    """Check the study `raw`, unless `folder` keeps what an earlier check of it found; see `recall` for `token`."""
    check_all_tables(raw, source, base, code)
    with in_file_order(raw):
        if "search" in raw:
            search, first = read_search(raw, source, base, code)
            written = search.resolved(raw, first)
            if (found := recall(folder, written, token)) is not None and found.setting is not None:
                setting, data = found.setting, build.dataset(first.cells[0].data)
                grid = _with_cuts(search.expand(setting), data, source)
            else:
                setting, grid, data = check_search(search, first)
            grid = replace(grid, resolved=search.resolved(raw, grid))
            return CheckedStudy(grid, data, text, code, search, setting, key_of(written))
        grid = expand(schema.parse_study(raw, source), source, base, code)
        if (found := recall(folder, grid.resolved, token)) is None:
            return CheckedStudy(*check_grid(grid, source), text, code)
        refused = {name for name, _ in found.refused}
        kept = tuple(cell for cell in grid.cells if cell.id not in refused)
        data = build.dataset(grid.cells[0].data)
        named = _with_cuts(replace(grid, cells=kept, refused=found.refused), data, source)
        return CheckedStudy(named, data, text, code)


def _with_cuts(grid: Grid, data: Dataset, source: str) -> Grid:
    """Return the grid, checked before, with names in place of automatic cuts."""
    mistakes = Mistakes(source)
    grid = name_auto_cuts(mistakes, grid, data)
    mistakes.stop()
    return grid
