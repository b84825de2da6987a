"""Contracts are narrow: whoever writes an algorithm of its kind reads at most twelve public members.

Members are public methods and properties, inherited ones too; the fields of a frozen value are its parameters.
"""

from __future__ import annotations

from importlib import import_module

import pytest

import splitfed
from splitfed.core.defense import _CAPABILITIES, Defense
from splitfed.registry import TABLES, load

MOST = 12
CONTRACTS = (
    "splitfed.aggregation.base:AggregationRule",
    "splitfed.attacks.base:Attack",
    "splitfed.attacks.training_time.training_attack:TrainingAttack",
    "splitfed.core.annealing:Course",
    "splitfed.core.defense:Accounted",
    "splitfed.core.defense:Calibrated",
    "splitfed.core.defense:Codec",
    "splitfed.core.defense:Defense",
    "splitfed.core.defense:GradientDefense",
    "splitfed.core.defense:LabelDefense",
    "splitfed.core.defense:LayerDefense",
    "splitfed.core.defense:LearnedDefense",
    "splitfed.core.defense:PenaltyDefense",
    "splitfed.core.defense:ReceiverPenaltyDefense",
    "splitfed.core.defense:ReleaseDefense",
    "splitfed.core.defense:TaskWeightDefense",
    "splitfed.core.defense:WeightDefense",
    "splitfed.core.gradient_privatizer:GradientPrivatizer",
    "splitfed.core.local_objective:LocalObjective",
    "splitfed.detectors.base:Detector",
    "splitfed.detectors.base:DetectorState",
    "splitfed.engines.base:Trainer",
    "splitfed.poisoning.base:Manipulation",
    "splitfed.schedules.base:Schedule",
)


def find(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(import_module(module), name)
    return found


def members(contract: type) -> set[str]:
    """Return the public members of a class that are ours, inherited ones too, without its fields."""
    ours = [kind for kind in contract.__mro__ if kind.__module__.startswith(("splitfed.", "tests."))]
    public = {name for kind in ours for name in vars(kind) if not name.startswith("_")}
    return public - set(getattr(contract, "__dataclass_fields__", ()))


@pytest.mark.parametrize("path", CONTRACTS)
def test_no_contract_has_more_than_twelve_public_members(path: str) -> None:
    found = members(find(path))
    assert 1 <= len(found) <= MOST, f"{path} has {len(found)}: {', '.join(sorted(found))}"


def test_members_are_counted() -> None:
    wide = type("Wide", (Defense,), {f"helper{n}": property(lambda self: 1) for n in range(7)})
    assert len(members(wide)) == len(members(Defense)) + 7 == MOST + 1


def test_every_capability_is_a_contract_that_people_can_import() -> None:
    capabilities = set(_CAPABILITIES.values())
    named = {path for path in CONTRACTS if path.startswith("splitfed.core.defense:")}
    assert {find(path) for path in named} == capabilities | {Defense}
    assert all(getattr(splitfed, kind.__name__) is kind for kind in capabilities)
    assert not any(issubclass(one, other) for one in capabilities for other in capabilities if one is not other)


@pytest.mark.parametrize("name", TABLES["defenses"])
def test_a_defense_offers_only_what_it_inherits(name: str) -> None:
    kind = load("defenses", name)
    offered = {hook for hook, capability in _CAPABILITIES.items() if issubclass(kind, capability)}
    assert offered
    assert {hook for hook in _CAPABILITIES if hasattr(kind, hook)} == offered
