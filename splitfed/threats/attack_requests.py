"""What a run is asked of attacks: made ready by names and budgets, asked in turn, with what it costs a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from splitfed.attacks.base import Attack, Phase, Progress
from splitfed.core.errors import InvalidInput, check_count, check_kind
from splitfed.data.dataset import Dataset
from splitfed.engines.base import FED
from splitfed.engines.engine import Engine
from splitfed.planning.private import cost_of_releases
from splitfed.privacy.ledger import Ledger
from splitfed.registry import load, name_of
from splitfed.threats.attack_result import AttackResult
from splitfed.threats.evaluator import Evaluator
from splitfed.threats.recorded_training import reads_training
from splitfed.threats.threat_models import threat_model_of, with_threat_model


def name_attacks(
    attacks: Sequence[str | Attack] | str | Attack, budget: str | None = None
) -> tuple[tuple[str, Attack], ...]:
    """Return name and attack of each, those given by name with the parameters of `budget` (None: the usual one).

    Raises `InvalidInput` where there is none, and for an attack that is no name beside a budget.
    """
    chosen = tuple(attacks) if isinstance(attacks, (tuple, list)) else (attacks,)
    for one in chosen:
        if isinstance(one, type) and issubclass(one, Attack):
            raise InvalidInput(f"attacks={one.__name__} is a class; expected an attack made of it, {one.__name__}()")
        check_kind("attacks", one, (str, Attack), "the names of attacks, or attacks")
        if budget is not None and not isinstance(one, str):
            made = f"{type(one).__name__}.with_budget({budget!r}, ...)"
            raise InvalidInput(f"budget={budget!r} is for attacks given by name; make this one as {made}")
    if not chosen:
        raise InvalidInput(f"attacks={attacks!r} holds no attack; expected at least one")
    return tuple(
        (one, load("attacks", one).with_budget(budget))
        if isinstance(one, str)
        else (name_of("attacks", type(one)), one)
        for one in chosen
    )


def ask_in_turn(
    evaluator: Evaluator,
    attacks: Sequence[tuple[str, Attack]],
    ledger: Callable[[], Ledger],
    *,
    adversary: str | None,
    victims: Dataset | None,
    client: int,
    seed: int,
    progress: Progress | None,
    number: int | None,
    classifier: bool,
    floors: bool,
    releases: int,
) -> Iterator[AttackResult]:
    """Check all `attacks`, name and attack of each, then run one after the other; parameters as of `Run.attack`."""
    past = [attack.phase is Phase.TRAINING for _, attack in attacks]
    trained = [one.phase is Phase.TRAINING or (number is not None and reads_training(one)) for _, one in attacks]
    if number is not None:
        check_count("round", number, high=max(evaluator.grants.rounds - 1, 0))
        if not any(trained):
            raise InvalidInput(
                f"round={number} is not allowed: {attacks[0][0]} is on no recorded training; leave it out"
            )
    if any(trained) and victims is not None:
        who = type(attacks[trained.index(True)][1]).__name__
        raise InvalidInput(f"{who} goes against training rows: name no victims")
    usual = FED if all(past) and FED in evaluator.engine.parties else None
    party = evaluator.adversary(adversary or usual)
    truth = evaluator.data.victims if all(trained) else evaluator.victims(victims)
    for name, attack in attacks:
        evaluator.check_releases(name, attack, releases, client)
    for name, asked in attacks:
        attack = with_threat_model(asked, evaluator.engine, party)
        found = evaluator.attack(
            name, attack, party, truth, client, seed, progress, number, classifier, floors, releases
        )
        costed = found if found.repeated is None else _with_cost(found, evaluator.engine, client, ledger().delta)
        yield replace(costed, quick=attack.quick, threat_model=threat_model_of(attack))


def _with_cost(result: AttackResult, engine: Engine, client: int, delta: float) -> AttackResult:
    """Return `result` with what all releases of a row cost it, where everything that crosses has a promise."""
    repeated = result.repeated
    if repeated is None or repeated.equal or repeated.steps:
        return result
    together, each = (cost_of_releases(engine, client, n, delta) for n in (repeated.count, 1))
    if together is None:
        return result
    return replace(result, repeated=replace(repeated, epsilon=together, each=each, delta=delta))
