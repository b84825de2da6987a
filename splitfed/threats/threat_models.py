"""Black box and white box: whether an adversary has weights of the client, by what it received in the run."""

from __future__ import annotations

from dataclasses import replace

from splitfed.attacks.base import Attack, UsesFurther
from splitfed.attacks.threat_model import BLACK_BOX, WEIGHTS, WHITE_BOX
from splitfed.engines.engine import Engine


def with_threat_model(attack: Attack, engine: Engine, party: str) -> Attack:
    """Return `attack` by `party` in the threat model that holds for it, where the attack leaves that open (None).

    "white_box" where the party has received weights in the run, as an aggregation server has, or a server through which
    clients hand their segments on.
    """
    if getattr(attack, "threat_model", BLACK_BOX) is not None:
        return attack
    received = any(flow.receiver == party and flow.kind == "weights" for flow in engine.traffic.flows)
    return replace(attack, threat_model=WHITE_BOX if received else BLACK_BOX)  # type: ignore[call-arg]


def threat_model_of(attack: Attack) -> str:
    """Return "white_box" where `attack` is shown trained weights of the client, else "black_box"."""
    shown = attack.requires | (attack.uses if isinstance(attack, UsesFurther) else frozenset())
    return WHITE_BOX if shown & WEIGHTS else BLACK_BOX
