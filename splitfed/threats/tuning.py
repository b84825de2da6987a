"""Tunes the parameters of an attack on pseudo-victims: rows of the attacker's own, whose truth it knows.

Paper: the search is the tree-structured Parzen estimator of Bergstra, Bardenet, Bengio, Kégl, "Algorithms for
hyper-parameter optimization", NIPS 2011, as in Akiba et al., "Optuna", KDD 2019.

The pseudo-victims are auxiliary rows that the attack may not learn from. Their releases come from queries, or from the
attacker's own copy of the upstream segments with the defenses drawn afresh, as its threat model allows. An attack with
neither cannot be tuned. No victim is read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge, Needs, Phase, Progress, Releases, Target, label_set_of, unwrap
from splitfed.attacks.scoring.prediction_scores import score_prediction
from splitfed.attacks.search_space import Choice, Span, check_choice
from splitfed.core.errors import InvalidInput, check_count, check_names, check_number
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import derive, generator
from splitfed.threats.computation_views import views_of
from splitfed.threats.evaluator import Evaluator

SHARE = 0.25
"""Default share of the auxiliary rows that serve as pseudo-victims."""

METRICS = {Target.INPUTS: "mse", Target.TOKENS: "token_accuracy", Target.LABELS: "accuracy"}


@dataclass(frozen=True)
class Trial:
    """Parameters that were tried, and their score on the pseudo-victims; None if the score was not finite."""

    parameters: Mapping[str, Any]
    score: float | None


@dataclass(frozen=True)
class Tuned:
    """Result of tuning: the best `attack`, its `score`, the score of the attack as `given`, and every trial.

    Scores are of the `metric` on the pseudo-victims.
    """

    attack: Attack
    metric: str
    score: float
    given: float
    trials: tuple[Trial, ...]


def check_tunable(name: str, attack: Attack, space: Mapping[str, Choice]) -> None:
    """Raise `InvalidInput` for an attack without tunable parameters, or without releases of rows that it knows."""
    if not space:
        raise InvalidInput(f"{name} has no space of parameters to tune")
    known = [field.name for field in fields(attack)]
    for parameter, choice in space.items():
        check_names(f"parameter of {name}", known, parameter)
        check_choice(f"space[{parameter!r}]", choice)
    if attack.target not in METRICS or attack.phase is not Phase.INFERENCE:
        raise InvalidInput(f"{name} cannot be tuned: it predicts no inputs or labels from releases alone")
    if not attack.requires & {Needs.QUERIES, Needs.UPSTREAM}:
        raise InvalidInput(
            f"{name} cannot be tuned: without {Needs.QUERIES} or {Needs.UPSTREAM} it has no releases of its own rows"
        )


class PseudoVictims:
    """Scores settings of an attack by `party` on a `share` of the auxiliary rows, the pseudo-victims.

    `releases`: how often each of these is released.
    """

    def __init__(
        self, evaluator: Evaluator, attack: Attack, party: str, client: int, seed: int, share: float, releases: int = 1
    ) -> None:
        engine = evaluator.engine
        views_of(engine.topologies[client]).check_readable(type(attack).__name__, attack, engine, party, client)
        check_number("tune share", share, low=0.0, high=1.0, open_low=True, open_high=True)
        self._party, self._client, self._seed, self._releases = party, client, seed, releases
        rows = evaluator.data.auxiliary
        count = round(share * len(rows))
        if not 2 <= count <= len(rows) - 2:
            raise InvalidInput(
                f"tune share={share!r} keeps {count} of {len(rows)} auxiliary rows as pseudo-victims; expected two or "
                "more, and two left to learn from"
            )
        order = torch.randperm(len(rows), generator=generator(seed, "tune", "split"))
        self.victims, self._known = rows.rows(order[:count]), rows.rows(order[count:])
        self._grants = replace(evaluator.grants, data=replace(evaluator.data, auxiliary=self._known))
        x = self.victims.x.to(engine.device)
        self._view = self._make_view(self._query_releases(attack, self._knowledge(attack, "pseudo"), x))

    def score(self, attack: Attack) -> float | None:
        """Return the score of `attack` by its metric, with the same random numbers in every call.

        None if it is not finite.
        """
        knowledge, target = self._knowledge(attack, "queries"), attack.target
        prediction = attack(self._view, knowledge, generator(self._seed, "tune", "attack")).prediction
        if not bool(torch.isfinite(prediction).all()):
            return None
        drawn, rows = generator(self._seed, "tune", "grade"), (self.victims, self._known)
        _, scores = score_prediction(
            target,
            prediction,
            *rows,
            drawn,
            label_set=label_set_of(attack),
        )
        return float(scores["attack"][METRICS[target]].mean)

    def _knowledge(self, attack: Attack, purpose: str) -> Knowledge:
        """Return the attacker's knowledge without the pseudo-victims; queries restart for every setting."""
        party, client = self._party, self._client
        return replace(
            self._grants.knowledge(party, client, derive(self._seed, "tune", purpose), self._releases),
            own=self._grants.own_inputs(party, client, self.victims.x),
            own_auxiliary=self._grants.own_inputs(party, client, self._known.x),
        )

    def _query_releases(self, attack: Attack, knowledge: Knowledge, x: Tensor) -> Releases:
        if Needs.QUERIES in attack.requires:
            return unwrap(knowledge.query)(x)
        with torch.no_grad():
            return unwrap(knowledge.sample)(x)

    def _make_view(self, released: Releases) -> View:
        """Return the view of a party that received `released`."""
        engine, replica = self._grants.engine, self._client
        topology, role = engine.topologies[replica], engine.parties[self._party].role
        stamp = Stamp("predict", replica, 0, 0, "pseudo-victims")
        messages = [
            Message(
                engine.party(replica, topology.role_of(edge.source)).name,
                self._party,
                "activation",
                edge.name,
                {value: released[value] for value in engine.all_facts[replica].data(edge.values)},
                stamp,
            )
            for edge in topology.crossings
            if topology.role_of(edge.target) == role
        ]
        return View(self._party, tuple(messages), copy.deepcopy(dict(engine.modules_of_party(self._party, replica))))


def tune(
    bench: PseudoVictims,
    attack: Attack,
    space: Mapping[str, Choice],
    trials: int,
    seed: int,
    progress: Progress | None = None,
) -> Tuned:
    """Return the best of `attack` as given and of `trials` settings that the search proposes."""
    check_count("trials", trials, low=1)
    # Optuna takes half a second to import.
    import optuna

    metric = METRICS[attack.target]
    if (default_score := bench.score(attack)) is None:
        raise InvalidInput(
            f"{type(attack).__name__} with its given parameters predicts numbers that are not finite; start from "
            "parameters with finite predictions"
        )
    tried: list[tuple[Attack, Trial]] = []

    def objective(trial: optuna.Trial) -> float:
        chosen = {name: _suggest(trial, name, choice) for name, choice in space.items()}
        setting = replace(attack, **chosen)
        setting_score = bench.score(setting)
        tried.append((setting, Trial(chosen, setting_score)))
        if progress is not None:
            progress(len(tried), trials)
        if setting_score is None:
            raise optuna.TrialPruned
        return setting_score

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=derive(seed, "tune", "search") % 2**32)
    better = min if metric == "mse" else max
    direction: Literal["minimize", "maximize"] = "minimize" if better is min else "maximize"
    optuna.create_study(sampler=sampler, direction=direction).optimize(objective, n_trials=trials)
    scored = [(default_score, attack), *((t.score, setting) for setting, t in tried if t.score is not None)]
    score, best = better(scored, key=lambda pair: pair[0])
    return Tuned(best, metric, score, default_score, tuple(t for _, t in tried))


def _suggest(trial: Any, name: str, choice: Choice) -> Any:
    if not isinstance(choice, Span):
        return choice[trial.suggest_categorical(name, list(range(len(choice))))]
    if choice.whole:
        return trial.suggest_int(name, int(choice.low), int(choice.high), log=choice.log)
    return trial.suggest_float(name, choice.low, choice.high, log=choice.log)
