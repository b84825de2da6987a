"""The trials of a search in Optuna: which are being done, which are over, and what the next one tries.

A trial is made in the state in which it is done, with the mark of the folder it is done in, and stays the same until it
is over: one that a crash left half done is taken up again under its number, with what it had drawn. One process a
folder draws and tells its trials, so only folders that share a storage can meet in it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive
from splitfed.study.config.search import FIXED, GENETIC, POPULATION, STARTUP, SearchStudy
from splitfed.study.config.search_space import Assignment, Dimension, SearchChoice, active, list_points, resolve
from splitfed.study.run.distinct_sampler import DistinctSampler, draw_points, spread_points
from splitfed.study.run.trials import LOCKED_SECONDS, detect_damage, open_database
from splitfed.training.checkpoint import write_atomic

OWNER, RECORD, VIOLATIONS, SEARCH = "folder", "record", "violations", "search"
"""Attributes of trials: whose it is, what came out, by how much constraints are violated; of the study: which search
it is."""


class DrawnTrial(NamedTuple):
    """A trial to do: its `number`, and what it tries."""

    number: int
    assignment: Assignment


class SearchQueue:
    """The trials of `search` that are done in `folder`; raises `Damaged` where its study.db is."""

    def __init__(self, search: SearchStudy, folder: Path) -> None:
        self._search = search
        # Known to other folders only where they share the trials.
        self._owner = "" if search.table.storage is None else _folder_mark(folder)
        self._taken: set[int] = set()
        with detect_damage(folder / "study.db"), _quiet():
            self._storage = open_storage(folder / "study.db", search.table.storage)
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=search.name,
                sampler=RandomSampler(seed=0),
                directions=[one.direction for one in search.objectives],
                load_if_exists=True,
            )
        self._id = self._storage.get_study_id_from_name(search.name)
        self._check_same()

    @cached_property
    def _points(self) -> list[Assignment]:
        return list_fixed_points(self._search)

    @cached_property
    def _distributions(self) -> dict[str, BaseDistribution]:
        return {name: distribution_of(dimension) for name, dimension in self._search.space.items()}

    @cached_property
    def _first_points(self) -> list[dict[str, Any]]:
        """What the first generation tries."""
        seed = derive(self._search.seed, "search", "first") % 2**32
        return spread_points(self._distributions, self._search.table.population or POPULATION, seed)

    def _check_same(self) -> None:
        """Refuse a storage in which a search of this name varies something else."""
        mine = fingerprint(self._search)
        there = self._study.user_attrs.get(SEARCH)
        if there is None:
            self._study.set_user_attr(SEARCH, mine)
        elif there != mine:
            raise InvalidInput(
                f"search.storage holds another search called {self._search.name!r}; give the study another name"
            )

    def take(self) -> DrawnTrial | None:
        """Return a trial to do: one that was begun before this call, else a new one; None where there is none."""
        with _quiet():
            trials = self.trials()
            for trial in trials:
                own = trial.state is TrialState.RUNNING and trial.user_attrs.get(OWNER) == self._owner
                if own and trial.number not in self._taken:
                    return self._draw(trial.number)
            if len(trials) >= self._search.trials:
                return None
            blank = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={OWNER: self._owner})
            identifier = self._storage.create_new_trial(self._id, template_trial=blank)
            number = self._storage.get_trial(identifier).number
            if number >= self._search.trials:  # another machine was faster
                self._study.tell(number, state=TrialState.FAIL)
                return None
            self.trials()  # Optuna's cache knows a trial only once it has read it
            return self._draw(number)

    def trials(self) -> list[FrozenTrial]:
        """Return the trials that there are, by number; two machines at once may have begun one too many."""
        return [t for t in self._study.get_trials(deepcopy=False) if t.number < self._search.trials]

    def tell(self, number: int, record: Mapping[str, Any]) -> None:
        """End the trial with this number: its `record` says how, and with which values."""
        with _quiet():
            self._study.sampler = self._sampler(number)
            self._storage.set_trial_user_attr(self._identifier(number), RECORD, dict(record))
            violations = list(record["violations"].values())
            self._storage.set_trial_user_attr(self._identifier(number), VIOLATIONS, violations)
            if record["state"] == "complete":
                self._study.tell(number, [record["objectives"][one.metric.name] for one in self._search.objectives])
            else:
                pruned = record["state"] == "pruned"
                self._study.tell(number, state=TrialState.PRUNED if pruned else TrialState.FAIL)

    def records(self) -> dict[int, Mapping[str, Any]]:
        """Return number -> the record of every trial that is over, in whatever folder."""
        return {
            t.number: t.user_attrs[RECORD] for t in self.trials() if t.state.is_finished() and RECORD in t.user_attrs
        }

    def _identifier(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))

    def _draw(self, number: int) -> DrawnTrial:
        """Let the sampler say what the trial tries; of one taken up again it is what it was."""
        self._taken.add(number)
        self._study.sampler = self._sampler(number)
        trial = optuna.trial.Trial(self._study, self._identifier(number))

        def suggest(dimension: Dimension) -> Any:
            return _read_drawn(dimension, _suggest(trial, dimension))

        if self._search.table.sampler in GENETIC:
            # What decides nothing in this trial is inherited all the same.
            everything = {name: suggest(dimension) for name, dimension in self._search.space.items()}
            return DrawnTrial(number, active(self._search.tree, everything))
        drawn: Assignment = {}

        def pick(dimension: Dimension) -> Any:
            drawn[dimension.name] = suggest(dimension)
            return drawn[dimension.name]

        resolve(self._search.tree, pick)
        return DrawnTrial(number, drawn)

    def _sampler(self, number: int) -> BaseSampler:
        """Return the sampler of the trial with this number: what it draws depends on that, the seed and the history."""
        table, seed = self._search.table, derive(self._search.seed, "search", number) % 2**32
        limits = _violations if self._search.constraints else None
        match table.sampler:
            case "tpe":
                return optuna.samplers.TPESampler(
                    n_startup_trials=table.startup or STARTUP,
                    multivariate=True,
                    group=True,
                    constant_liar=True,
                    seed=seed,
                    constraints_func=limits,
                )
            case "nsga2" | "nsga3":
                kind = optuna.samplers.NSGAIISampler if table.sampler == "nsga2" else optuna.samplers.NSGAIIISampler
                inner = kind(population_size=table.population or POPULATION, seed=seed, constraints_func=limits)
                return DistinctSampler(inner, self._distributions, self._first_points, self._setting_of)
        point = {name: _write_drawn(self._search.space[name], value) for name, value in self._points[number].items()}
        return PartialFixedSampler(point, RandomSampler(seed=0))

    def _setting_of(self, drawn: Mapping[str, Any]) -> str:
        """Return what tells the setting that was drawn from others: what decides something in it, rounded."""
        read = {name: _read_drawn(self._search.space[name], value) for name, value in drawn.items()}
        return json.dumps(active(self._search.tree, read), sort_keys=True)


def list_fixed_points(search: SearchStudy) -> list[Assignment]:
    """Return what each trial of a search by "grid", "random" or "qmc" tries: the same for the same seed, always.

    Random points are drawn independently; those of qmc are a scrambled Sobol sequence (Owen, 1998) over all parameters.
    """
    assert search.table.sampler in FIXED
    if search.table.sampler == "grid":
        return list_points(search.tree)
    wanted = {name: distribution_of(dimension) for name, dimension in search.space.items()}
    seed = derive(search.seed, "search") % 2**32
    with _quiet():
        if search.table.sampler == "qmc":
            drawn = spread_points(wanted, search.trials, seed)
        else:
            drawn = draw_points(RandomSampler(seed=seed), wanted, search.trials)
    return [
        active(search.tree, {name: _read_drawn(search.space[name], value) for name, value in point.items()})
        for point in drawn
    ]


def distribution_of(dimension: Dimension) -> BaseDistribution:
    """Return what Optuna calls a range or a choice."""
    if isinstance(dimension, SearchChoice):
        return CategoricalDistribution(dimension.labels)
    low, high = dimension.ends
    if dimension.whole:
        return IntDistribution(low, high, log=dimension.log, step=1 if dimension.step is None else int(dimension.step))
    return FloatDistribution(low, high, log=dimension.log, step=dimension.step)


def open_storage(path: Path, address: str | None) -> RDBStorage:
    """Open the storage at the SQL `address`, by default in the SQLite file `path`; `$NAME` is a variable's value."""
    if address is None:
        return open_database(path)
    if address.startswith("$"):
        name, address = address[1:], os.environ.get(address[1:], "")
        if not address:
            raise InvalidInput(f"search.storage names the environment variable {name}, which is not set")
    given = {"connect_args": {"timeout": LOCKED_SECONDS}} if address.startswith("sqlite") else {}
    try:
        return RDBStorage(address, engine_kwargs={"poolclass": NullPool, **given})
    except (ImportError, SQLAlchemyError, ValueError, optuna.exceptions.StorageInternalError) as error:
        reason = str(error).replace(address, "...").splitlines()[0][:200]
        raise InvalidInput(f"search.storage cannot be opened: {reason}") from None


def fingerprint(search: SearchStudy) -> str:
    """Return what tells one search from another: what varies, and what it goes by."""
    space = {name: str(distribution_of(one)) for name, one in search.space.items()}
    goals = [f"{one.direction} {one.metric.name} {one.cap}" for one in search.objectives]
    return json.dumps(
        [search.table.sampler, space, goals, [one.text for one in search.constraints], list(search.seeds)]
    )


def _suggest(trial: optuna.Trial, dimension: Dimension) -> Any:
    if isinstance(dimension, SearchChoice):
        return trial.suggest_categorical(dimension.name, dimension.labels)
    low, high = dimension.ends
    if dimension.whole:
        step = 1 if dimension.step is None else int(dimension.step)
        return trial.suggest_int(dimension.name, low, high, step=step, log=dimension.log)
    return trial.suggest_float(dimension.name, low, high, step=dimension.step, log=dimension.log)


def _folder_mark(folder: Path) -> str:
    """Return the mark by which a storage that several folders share knows this one, made at first use."""
    path = folder / ".folder"
    if not path.is_file():
        write_atomic(path, os.urandom(16).hex().encode())
    return path.read_text("utf-8")


def _write_drawn(dimension: Dimension, value: Any) -> Any:
    return dimension.labels[value] if isinstance(dimension, SearchChoice) else value


def _read_drawn(dimension: Dimension, drawn: Any) -> Any:
    return dimension.labels.index(drawn) if isinstance(dimension, SearchChoice) else dimension.value_of(drawn)


def _violations(trial: FrozenTrial) -> Sequence[float]:
    return list(trial.user_attrs.get(VIOLATIONS, []))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's own lines and its warnings of what is experimental off standard error."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
