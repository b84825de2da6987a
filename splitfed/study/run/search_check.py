"""What of a search can be refused before any trial: data, metrics that no run has, and values that fit nowhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from splitfed.data.dataset import Dataset
from splitfed.study.config import build
from splitfed.study.config.grid import Grid
from splitfed.study.config.mistakes import InvalidStudy, Mistakes
from splitfed.study.config.search import SearchStudy
from splitfed.study.config.search_metrics import check_measured
from splitfed.study.config.search_space import KINDS, Assignment, SearchChoice, dimensions, list_variations
from splitfed.study.run.preflight import check_grid

TRIED = 24
"""Combinations of tables in which a value is tried, until it fits in one."""


def check_search(search: SearchStudy, first: Grid) -> tuple[Assignment, Grid, Dataset]:
    """Return a setting that fits, its runs, their cuts named, and the data; `first`: the search's first setting.

    Values are tried one at a time beside the first ones, and with other tables where they do not fit: a search may hold
    a schedule that only one of its topologies takes, and a trial that does not fit is refused when its turn comes. A
    value that fits nowhere is a mistake. Raises `InvalidStudy` with a line a mistake.
    """
    mistakes = Mistakes(search.source)
    with mistakes.at("data"):
        data = build.dataset(first.cells[0].data)
    mistakes.stop()
    cell = first.cells[0]
    places = {f"search.objectives.{one.metric.name}": one.metric for one in search.objectives}
    places |= {f"search.constraints[{i}]": one.metric for i, one in enumerate(search.constraints)}
    check_measured(
        mistakes,
        places,
        images=len(data.shape) == 3,
        validation=cell.data.split.get("validation", 0) > 0,
        clock=cell.training.speeds is not None,
        target=cell.target is not None,
    )
    fitting = None
    for number, assignment in enumerate(list_variations(search.tree)):
        mistakes.stop_if_many()
        refusal = None
        for tried in _beside_other_tables(search, assignment):
            try:
                # The first setting with all seeds, for the split of each may be refused; the others with one.
                found = check_setting(search, tried, data, seeds=None if number == 0 else 1)
            except InvalidStudy as error:
                refusal = refusal or error
            else:
                refusal, fitting = None, fitting or (tried, found)
                break
        if refusal is not None:
            mistakes.take_lines(refusal.lines, refusal.more)
    mistakes.stop()
    assert fitting is not None
    return *fitting, data


def check_setting(
    search: SearchStudy, assignment: Mapping[str, Any], data: Dataset, *, seeds: int | None = None
) -> Grid:
    """Return the runs of a setting, checked as those of a grid; raises `InvalidStudy` with places in the search.

    `seeds`: how many of its seeds are looked at; None for all.
    """
    grid = search.expand(assignment)
    looked_at = list(dict.fromkeys(cell.seed for cell in grid.cells))[:seeds]
    try:
        return check_grid(
            replace(grid, cells=tuple(c for c in grid.cells if c.seed in looked_at)), search.source, data
        )[0]
    except InvalidStudy as error:
        raise search.with_places(error, assignment) from None


def _beside_other_tables(search: SearchStudy, assignment: Assignment) -> Iterator[Assignment]:
    """Yield `assignment`, then the same with other tables where it does not say itself which."""
    yield assignment
    known = dimensions(search.tree)
    first = {name: dimension.ends[0] for name, (dimension, _) in known.items()}
    tables = [name for name in (*KINDS, "training.schedule") if isinstance(known.get(name, (None,))[0], SearchChoice)]
    # What differs from the first values is what is tried, and which tables it stands in.
    free = [name for name in tables if assignment[name] == first[name]]
    others = itertools.product(*(known[name][0].ends for name in free))
    for ends in itertools.islice(others, 1, TRIED):
        yield {**assignment, **dict(zip(free, ends, strict=True))}
