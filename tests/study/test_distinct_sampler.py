"""Genetic samplers try no setting twice, and begin with points that lie evenly over the space."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, NSGAIIISampler, NSGAIISampler
from optuna.trial import FrozenTrial

from splitfed.study.run.distinct_sampler import DistinctSampler, spread_points

SPACE: dict[str, BaseDistribution] = {
    "kind": CategoricalDistribution(["none", "noise", "dropout", "rounding"]),
    "noise": FloatDistribution(0.1, 10.0, log=True),
    "only": CategoricalDistribution(["one"]),
}


def setting_of(drawn: Mapping[str, Any]) -> tuple[Any, ...]:
    """Only noise has a strength."""
    assert drawn["only"] == "one"
    return drawn["kind"], drawn["noise"] if drawn["kind"] == "noise" else None


def score(drawn: Mapping[str, Any]) -> tuple[float, float]:
    """Less noise and no noise are good at once, so that parents would be copied."""
    return {"none": 0.0, "noise": drawn["noise"], "dropout": 5.0, "rounding": 6.0}[drawn["kind"]], 1 / drawn["noise"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    optuna.logging.set_verbosity(before)


def search(trials: int, wrapped: bool = True, kind: type[BaseSampler] = NSGAIISampler, population: int = 4) -> Any:
    """Return the study after so many trials; each has a sampler of its own, as in a search."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    first = spread_points(SPACE, population, seed=0)
    for number in range(trials):
        inner = kind(population_size=population, seed=number)  # type: ignore[call-arg]
        study.sampler = DistinctSampler(inner, SPACE, first, setting_of) if wrapped else inner
        trial = study.ask()
        drawn = {name: trial._suggest(name, one) for name, one in SPACE.items()}
        study.tell(trial, score(drawn))
    return study


def settings(trials: Sequence[FrozenTrial]) -> list[tuple[Any, ...]]:
    return [setting_of(trial.params) for trial in trials]


@pytest.mark.parametrize("kind", [NSGAIISampler, NSGAIIISampler])
def test_no_setting_comes_twice_where_optuna_repeats_many(kind: type[BaseSampler]) -> None:
    found = settings(search(24, kind=kind).trials)
    assert len(set(found[4:])) == 20
    assert not set(found[4:]) & set(found[:4])
    assert len(set(settings(search(24, wrapped=False, kind=kind).trials))) < 20


def test_the_first_generation_lies_evenly_and_parents_come_from_it() -> None:
    trials = search(6).trials
    assert [trial.params for trial in trials[:4]] == spread_points(SPACE, 4, seed=0)
    assert sorted(trial.params["kind"] for trial in trials[:4]) == ["dropout", "noise", "none", "rounding"]
    generations = [next(v for k, v in t.system_attrs.items() if "generation" in k) for t in trials]
    assert generations == [0, 0, 0, 0, 1, 1]


def test_the_same_trials_are_followed_by_the_same_draws() -> None:
    one, longer = search(8), search(12)
    assert [trial.params for trial in one.trials] == [trial.params for trial in longer.trials[:8]]


def test_a_space_without_any_other_setting_ends() -> None:
    study = optuna.create_study()
    few: dict[str, BaseDistribution] = {"kind": CategoricalDistribution(["none", "noise"])}
    for number in range(5):
        study.sampler = DistinctSampler(NSGAIISampler(population_size=2, seed=number), few, [], lambda p: p["kind"])
        study.ask()._suggest("kind", few["kind"])
    # None is over: two that are done at the same time have two settings, and there is no third.
    assert {trial.params["kind"] for trial in study.trials[:2]} == {"none", "noise"}
    assert len(study.trials) == 5
