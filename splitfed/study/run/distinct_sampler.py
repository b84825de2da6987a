"""Samplers of generations when trials are few: the first ones lie evenly over the space, and no setting comes twice.

A child that inherits all that decides something from its parents is a trial spent on what is known, and its copies
crowd the others out of the next generation. Papers: Deb, Pratap, Agarwal, Meyarivan, "A fast and elitist
multiobjective genetic algorithm: NSGA-II", IEEE Transactions on Evolutionary Computation 2002, for what is wrapped;
Owen, "Scrambling Sobol' and Niederreiter-Xing points", Journal of Complexity 1998, for the first generation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

DRAWS = 100
"""How often a setting is drawn before one that was tried is taken again: a space may have no other left."""


class DistinctSampler(BaseSampler):
    """Draws as `inner` does, until the setting is one that no other trial has.

    `space`: every parameter, all of which are drawn in every trial. `first`: what the first trials try, by number.
    `setting_of`: what parameters decide, so that those which decide nothing make no other setting.
    """

    def __init__(
        self,
        inner: BaseSampler,
        space: Mapping[str, BaseDistribution],
        first: Sequence[Mapping[str, Any]],
        setting_of: Callable[[Mapping[str, Any]], Hashable],
    ) -> None:
        self._inner, self._space, self._first, self._setting_of = inner, dict(space), first, setting_of

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return every parameter: a setting is drawn as a whole."""
        return {name: one for name, one in self._space.items() if not one.single()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return a whole setting that no other trial has, whether it is over or not."""
        drawn = self._draw(study, trial, search_space)  # for a first trial too: it gives it its generation
        if trial.number < len(self._first):
            return {name: self._first[trial.number][name] for name in search_space}
        others = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        tried = {self._setting_of(t.params) for t in others if self._space.keys() <= t.params.keys()}
        only = {name: _only_value(one) for name, one in self._space.items() if name not in search_space}
        for _ in range(DRAWS):
            if self._setting_of({**only, **drawn}) not in tried:
                break
            drawn = self._draw(study, trial, search_space)
        return drawn

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return what the wrapped sampler draws."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Let the wrapped sampler note the end of a trial."""
        self._inner.after_trial(study, trial, state, values)

    def _draw(self, study: optuna.Study, trial: FrozenTrial, space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
        known = self._inner.infer_relative_search_space(study, trial)
        inherited = self._inner.sample_relative(study, trial, known)
        return {
            name: inherited[name] if name in inherited else self.sample_independent(study, trial, name, one)
            for name, one in space.items()
        }


def spread_points(space: Mapping[str, BaseDistribution], count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` points of a scrambled Sobol sequence over `space`, the same for the same seed, always."""
    # The first point is none of the sequence: the sampler learns the parameters from it.
    return draw_points(optuna.samplers.QMCSampler(scramble=True, seed=seed), space, count + 1)[1:]


def draw_points(sampler: BaseSampler, space: Mapping[str, BaseDistribution], count: int) -> list[dict[str, Any]]:
    """Return `count` points that `sampler` draws in a study of its own."""
    study, points = optuna.create_study(sampler=sampler), []
    for _ in range(count):
        trial = study.ask(dict(space))
        study.tell(trial, 0.0)
        points.append(trial.params)
    return points


def _only_value(one: BaseDistribution) -> Any:
    if isinstance(one, CategoricalDistribution):
        return one.choices[0]
    assert isinstance(one, (FloatDistribution, IntDistribution))
    return one.low
