"""Checked requests for attacks on a run: which attack, by which party, on which rows.

An attack without a threat model of its own (None) gets that of its adversary: white box if the adversary received
trained weights in the run, as an aggregation server does, or a server that relays segments between clients.
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
    """Request for what `party` receives when the rows `victims` pass through the parties of `client`, `releases` times.

    `seed`: seed of all random draws of the observation.
    """

    party: str
    victims: Dataset
    client: int
    seed: int
    releases: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class AttackRequest(Observation):
    """Request that `party` run `attack`, whose name in results is `name`.

    `number`: the round of recorded training to attack, or the last round of recorded steps to read; None: the newest
    round for an attack on recorded training, no recorded steps for all others. `classifier`: whether a classifier of
    clean rows scores reconstructions too. `floors`: whether floors (of reconstructions from releases, of labels) and
    oracles are scored.
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
    """Return (name, attack) pairs; attacks given by name get the parameters of `budget` (None: the usual budget).

    Raises `InvalidInput` for an empty list, an attack class instead of an instance, and an instance beside a `budget`.
    """
    chosen = tuple(attacks) if isinstance(attacks, (tuple, list)) else (attacks,)
    for one in chosen:
        if isinstance(one, type) and issubclass(one, Attack):
            raise InvalidInput(f"attacks={one.__name__} is a class; expected an instance, {one.__name__}()")
        check_kind("attacks", one, (str, Attack), "the names of attacks, or attacks")
        if budget is not None and not isinstance(one, str):
            made = f"{type(one).__name__}.with_budget({budget!r}, ...)"
            raise InvalidInput(f"budget={budget!r} applies to attacks given by name; construct this attack as {made}")
    if not chosen:
        raise InvalidInput(f"attacks={attacks!r} is empty; expected at least one attack")
    return tuple(
        (one, load("attacks", one).with_budget(budget))
        if isinstance(one, str)
        else (name_of("attacks", type(one)), one)
        for one in chosen
    )


def with_threat_model(attack: Attack, engine: Engine, party: str) -> Attack:
    """Return `attack` with the threat model of the adversary `party` if the attack leaves its own open (None)."""
    if getattr(attack, "threat_model", BLACK_BOX) is not None:
        return attack
    received = any(flow.receiver == party and flow.kind == "weights" for flow in engine.traffic.flows)
    return replace(attack, threat_model=WHITE_BOX if received else BLACK_BOX)  # type: ignore[call-arg]


def threat_model_of(attack: Attack) -> str:
    """Return "white_box" if `attack` is given trained weights of the client, else "black_box"."""
    shown = attack.requires | (attack.uses if isinstance(attack, UsesFurther) else frozenset())
    return WHITE_BOX if shown & WEIGHTS else BLACK_BOX
