"""Attacks that live in the training of a study's runs: who shares a training, and which trainings there are for them.

A passive training attack changes nothing that others learn, so it joins the honest training of every setting. An active
one does: every setting is trained once more for each of them, and that run is asked nothing but what it learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from splitfed.attacks.base import Attack
from splitfed.attacks.training_time.training_attack import TrainingAttack, TrainingAttackState
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.engines.observers import Observable
from splitfed.planning.validation import Prepared
from splitfed.registry import name_of
from splitfed.study.config import build
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import AttackSetting, RunSpec
from splitfed.threats.knowledge import curious
from splitfed.threats.training_time import place_attacks


class TrainingVariant(NamedTuple):
    """How a setting is trained: hijacked by `training_attack` or honestly, and the `attacks` that go against it."""

    training_attack: AttackSetting | None
    attacks: tuple[AttackSetting, ...]


def training_role(kind: type[Attack]) -> Literal["outside", "passive", "active"]:
    """Return how an attack is in the training."""
    if not issubclass(kind, TrainingAttack):
        return "outside"
    return "active" if kind.active else "passive"


def plan_trainings(mistakes: Mistakes, attack_settings: Sequence[AttackSetting], honest: bool) -> list[TrainingVariant]:
    """Return the trainings of every setting; without an `honest` one the hijacked are asked ordinary attacks too."""
    active = [setting for setting in attack_settings if setting.lives == "active"]
    if honest:
        others = tuple(setting for setting in attack_settings if setting.lives != "active")
        return [TrainingVariant(None, others), *(TrainingVariant(one, (one,)) for one in active)]
    if not active:
        mistakes.add("study.honest", "false leaves no run: no attack is an active training attack")
    for setting in attack_settings:
        if setting.lives == "passive":
            mistakes.add(
                setting.where, f"{setting.attack.name} lives in honest trainings, which study.honest = false leaves out"
            )
    outside = tuple(setting for setting in attack_settings if setting.lives == "outside")
    return [TrainingVariant(one, (one, *outside)) for one in active]


def training_attacks(cell: RunSpec, topology: Topology) -> tuple[dict[str, TrainingAttack], dict[str, int]]:
    """Return party -> the attack of `cell` that lives inside training there, and after how many rounds it reports."""
    inside = {_party_of(setting, topology): setting for setting in cell.attacks if setting.lives != "outside"}
    attacks = {party: cast(TrainingAttack, build.attack(setting)) for party, setting in inside.items()}
    return attacks, {party: setting.every for party, setting in inside.items() if setting.every is not None}


def add_training_attack(engine: Observable, ready: Prepared, setting: AttackSetting) -> None:
    """Let the training attack of `setting` into `engine`; refuse a second one at its party, or one that cannot work."""
    party = _party_of(setting, ready.topology)
    other = engine.training_attacks.get(party)
    if isinstance(other, TrainingAttackState):
        raise InvalidInput(
            f"{name_of('attacks', type(other.plan))} and {setting.attack.name} are both at {party!r}; expected one "
            "training attack a party: give each its own study"
        )
    plan = build.attack(setting)
    assert isinstance(plan, TrainingAttack)
    place_attacks(engine, ready, {party: plan})


def _party_of(setting: AttackSetting, topology: Topology) -> str:
    return setting.adversary or curious(topology)
