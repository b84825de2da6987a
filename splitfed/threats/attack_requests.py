"""What a run is asked of attacks: who attacks whose rows, with which attack, made once from checked input.

An attack that leaves its threat model open has the one that holds for its adversary: white box where that has received
weights in the run, as an aggregation server has, or a server through which clients hand their segments on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitfed.attacks.base import Attack, Progress, UsesFurther
from splitfed.attacks.threat_model import BLACK_BOX, WEIGHTS, WHITE_BOX
from splitfed.core.errors import InvalidInput, check_kind
from splitfed.data.dataset import Dataset
from splitfed.engines.engine import Engine
from splitfed.registry import load, name_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Observation:
    """What `party` learns of the rows `victims`, which pass through the parties of `client` `releases` times.

    `seed`: of everything that is drawn for the answer.
    """

    party: str
    victims: Dataset
    client: int
    seed: int
    releases: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class AttackRequest(Observation):
    """One attack that `party` is to run: `attack`, called `name`.

    `number`: the round of recorded training that it goes against, or up to which it reads steps; None: the newest of an
    attack on recorded training. `classifier`: whether a classifier of clean rows scores reconstructions too. `floors`:
    whether floors (of reconstructions from releases, of labels) and oracles are scored.
    """

    name: str
    attack: Attack
    number: int | None = None
    classifier: bool = False
    floors: bool = True
    progress: Progress | None = None


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


def with_threat_model(attack: Attack, engine: Engine, party: str) -> Attack:
    """Return `attack` by `party` in the threat model that holds for it, where the attack leaves that open (None)."""
    if getattr(attack, "threat_model", BLACK_BOX) is not None:
        return attack
    received = any(flow.receiver == party and flow.kind == "weights" for flow in engine.traffic.flows)
    return replace(attack, threat_model=WHITE_BOX if received else BLACK_BOX)  # type: ignore[call-arg]


def threat_model_of(attack: Attack) -> str:
    """Return "white_box" where `attack` is shown trained weights of the client, else "black_box"."""
    shown = attack.requires | (attack.uses if isinstance(attack, UsesFurther) else frozenset())
    return WHITE_BOX if shown & WEIGHTS else BLACK_BOX
