"""The `[search]` table of a study: what varies, by which sampler, for which objectives, and the study of each trial."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import NameResolver
from splitfed.registry import TABLES, load
from splitfed.study.config import schema
from splitfed.study.config.client_tables import cuts_model
from splitfed.study.config.grid import Grid, expand, number_repeats
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import InvalidStudy, Mistakes
from splitfed.study.config.run_spec import RunSpec, format_value, slug
from splitfed.study.config.schema import SearchTable
from splitfed.study.config.search_metrics import MetricReader, SearchConstraint, SearchMetric, SearchObjective
from splitfed.study.config.search_space import (
    KINDS,
    Dimension,
    SearchChoice,
    assigned,
    count_points,
    describe,
    dimensions,
    list_variations,
    read_space,
)
from splitfed.study.config.values import LIMIT, read_table, table_of

POPULATION, STARTUP = 10, 10
"""How many trials a generation of nsga2 and nsga3 has, and how many tpe draws at random first."""

GENETIC = ("nsga2", "nsga3")
FIXED = ("grid", "random", "qmc")
"""Samplers whose trials depend on the study's seed alone, not on what other trials found."""

PRICE = (
    "the epsilon of a trial is about that trial alone: to choose among trials on the same rows has a price, which no "
    "epsilon here counts"
)
"""What is to be known of every search in which something is promised."""

_PASSWORD = re.compile(r"://[^/@:]*:[^@]+@")


@dataclass(frozen=True)
class SearchStudy:
    """A study whose settings are chosen by a sampler: `tree` is it as written, ranges and choices as objects.

    `table` is `[search]` with every default; `source`, `base` and `code` are those of `grid.expand`.
    """

    tree: Mapping[str, Any] = field(repr=False)
    table: SearchTable
    objectives: tuple[SearchObjective, ...]
    constraints: tuple[SearchConstraint, ...]
    source: str
    base: Path
    code: NameResolver

    @cached_property
    def seed(self) -> int:
        """The seed of the sampler: the study's first."""
        return int(self.seeds[0])

    @property
    def seeds(self) -> Sequence[int]:
        """The seeds that every trial is repeated with."""
        return list(self.tree["study"].get("seeds", [0]))

    @property
    def name(self) -> str:
        """The name of the study."""
        return str(self.tree["study"]["name"])

    @cached_property
    def trials(self) -> int:
        """How many trials there are."""
        return count_points(self.tree) if self.table.trials is None else self.table.trials

    @property
    def metrics(self) -> dict[str, SearchMetric]:
        """Every metric that the search goes by, by name."""
        named = [one.metric for one in self.objectives] + [one.metric for one in self.constraints]
        return {metric.name: metric for metric in named}

    @cached_property
    def space(self) -> dict[str, Dimension]:
        """Everything that varies, by name."""
        return {name: dimension for name, (dimension, _) in dimensions(self.tree).items()}

    def study_of(self, assignment: Mapping[str, Any]) -> dict[str, Any]:
        """Return the study of one trial, as plain tables without `[search]`."""
        raw: dict[str, Any] = assigned(self.tree, assignment)
        tables = self.tree.get("topology")
        if isinstance(tables, list) and tables and isinstance(tables[0], SearchChoice):
            # Of several topologies some may have models in their own tables, which leaves [model] without a use.
            table = raw["topology"][0]
            if isinstance(table.get("name"), str) and cuts_model(self.code, table["name"]) is False:
                raw.pop("model", None)
        return raw

    def expand(self, assignment: Mapping[str, Any]) -> Grid:
        """Return the runs of one trial, one a seed and training; raises `InvalidStudy` with places in the search."""
        raw = self.study_of(assignment)
        try:
            grid = expand(schema.parse_study(raw, self.source), self.source, self.base, self.code)
        except InvalidStudy as error:
            raise self.with_places(error, assignment) from None
        return replace(grid, cells=tuple(self._name_cells(grid.cells, raw, assignment)))

    def _name_cells(
        self, cells: Sequence[RunSpec], raw: Mapping[str, Any], assignment: Mapping[str, Any]
    ) -> Iterator[RunSpec]:
        """Yield the runs with names that no other setting has: labels say neither optimizers nor rounds."""
        told = {key: table for key, table in raw.items() if key not in ("study", "data", "attack")}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        variant = ", ".join(
            f"{name.removeprefix('training.')}={format_value(value)}"
            for name, value in describe(self.tree, assignment).items()
            if name.startswith("training.") and not name.startswith("training.schedule")
        )
        for cell in cells:
            stem, seed = cell.id.rsplit("--", 1)
            yield replace(cell, id=f"{stem}--{digest}--{seed}", variant=variant)

    def with_places(self, error: InvalidStudy, assignment: Mapping[str, Any]) -> InvalidStudy:
        """Return `error`, raised for the study of one trial, with the places that its tables have in the search."""
        return InvalidStudy([self._with_place(line, assignment) for line in error.lines], error.more)

    def _with_place(self, line: str, assignment: Mapping[str, Any]) -> str:
        for key in (*KINDS, "training.schedule"):
            found = self.space.get(key)
            old = key if key == "training.schedule" else f"{key}[0]"
            start = f"{self.source}: {old}"
            if found is not None and line.startswith(start) and line[len(start) : len(start) + 1] in (".", ":"):
                return f"{self.source}: {key}[{assignment[key]}]{line[len(start) :]}"
        return line

    def resolved(self, raw: Mapping[str, Any], grid: Grid) -> dict[str, Any]:
        """Return the search `raw` as plain tables: with every default of `[search]`, and paths that start anywhere."""
        objectives = {one.metric.name: one.table for one in self.objectives}
        search = table_of(self.table) | {"objectives": objectives}
        return {
            **{key: table for key, table in raw.items() if key != "search"},
            "data": grid.resolved["data"],
            **({"model": _with_resolved_text(raw["model"], grid.resolved.get("model", {}))} if "model" in raw else {}),
            "search": search,
        }


def _with_resolved_text(given: Any, resolved: Any) -> Any:
    """Return the table of a model, or several, `given` with its texts, which may be paths, as `resolved` has them."""
    if isinstance(given, list):
        pairs = zip(given, resolved, strict=True) if isinstance(resolved, list) else ()
        return [_with_resolved_text(*pair) for pair in pairs] or given
    return {key: resolved.get(key, value) if isinstance(value, str) else value for key, value in given.items()}


def read_search(raw: Mapping[str, Any], source: str, base: Path, code: NameResolver) -> tuple[SearchStudy, Grid]:
    """Return the search that the study `raw` asks for, and the runs of its first setting.

    Every setting in which one parameter is at an end of its range, or at one of its options, and all others at their
    first, is put together as far as is possible without data. Raises `InvalidStudy` naming every mistake.
    """
    mistakes = Mistakes(source)
    tree = read_space(StudyReader(mistakes, code), {key: table for key, table in raw.items() if key != "search"})
    table = _read_table(mistakes, raw["search"])
    bare = SearchStudy(tree, table or SearchTable(objectives={"utility": "maximize"}), (), (), source, base, code)
    first = {name: dimension.ends[0] for name, dimension in bare.space.items()}
    try:
        schema.parse_study(bare.study_of(first), source)
    except InvalidStudy as error:
        mistakes.take_lines(bare.with_places(error, first).lines, error.more)
    mistakes.stop()
    assert table is not None
    if dict(raw["study"]).get("skip_refused"):
        mistakes.add("study.skip_refused", "is for grids: a search refuses a trial that does not fit, and goes on")
    grid = None
    for assignment in list_variations(tree):
        mistakes.stop_if_many()
        try:
            found = bare.expand(assignment)
            grid = grid or found
        except InvalidStudy as error:
            mistakes.take_lines(error.lines, error.more)
    reader = MetricReader(mistakes, _attack_targets(raw, code))
    objectives = reader.objectives(table.objectives)
    constraints = reader.constraints(table.constraints)
    table = _check_sampler(mistakes, bare, first)
    mistakes.stop()
    assert grid is not None
    return replace(bare, table=table, objectives=objectives, constraints=constraints), grid


def _read_table(mistakes: Mistakes, given: Any) -> SearchTable | None:
    """Return `[search]` after a check of its structure; None after a mistake."""
    found = read_table(mistakes, "search", SearchTable, given)
    if found is not None and found.storage is not None:
        address = found.storage
        if not address.startswith("$") and not re.match(r"[A-Za-z][A-Za-z0-9+_]*://", address):
            mistakes.add(
                "search.storage",
                f"{address!r} is not allowed; expected an SQL address such as "
                "postgresql://host/name, or $NAME of an environment variable that holds one",
            )
        elif _PASSWORD.search(address):
            mistakes.add(
                "search.storage",
                "holds a password, which every copy of the study would show; put the address "
                'into an environment variable and write storage = "$NAME"',
            )
    return found


def _check_sampler(mistakes: Mistakes, search: SearchStudy, first: Mapping[str, Any]) -> SearchTable:
    """Return `[search]` with the defaults of its sampler; note what does not go with it."""
    table, sampler = search.table, search.table.sampler
    if not first:
        mistakes.add("search", "nothing varies: write {low = ..., high = ...} or {choice = [...]} where a value stands")
    if sampler == "grid":
        if table.trials is not None:
            mistakes.add("search.trials", "is for other samplers; grid tries every combination once")
        with mistakes.at("search.sampler"):
            if (count := count_points(search.tree)) > LIMIT:
                raise InvalidInput(f"the grid has {count} settings; at most {LIMIT} are allowed")
    elif table.trials is None:
        mistakes.add("search.trials", "is missing; add trials = ...")
    for key, users in (("population", GENETIC), ("startup", ("tpe",))):
        if getattr(table, key) is not None and sampler not in users:
            mistakes.add(f"search.{key}", f"is for {' and '.join(users)}, not for {sampler}")
    defaults = {"population": POPULATION} if sampler in GENETIC else {"startup": STARTUP} if sampler == "tpe" else {}
    missing: dict[str, Any] = {k: v for k, v in defaults.items() if getattr(table, k) is None}
    return replace(table, **missing)


def _attack_targets(raw: Mapping[str, Any], code: NameResolver) -> dict[str, str]:
    """Return key -> name of the target for the attacks of a study; an unknown one is a mistake of its own table."""
    named = [table["name"] for table in raw.get("attack", []) if isinstance(table.get("name"), str)]
    found = {}
    for key, name in zip(number_repeats([slug(name) for name in named]), named, strict=True):
        if ":" in name or name in TABLES["attacks"]:
            try:
                kind: Any = code.load("attacks", name) if ":" in name else load("attacks", name)
            except InvalidInput:
                continue
            found[key] = kind.target.name
    return found
