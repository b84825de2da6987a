"""What an engine calls its parts: checkpoints and scripts of an earlier version, which called them otherwise, go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from splitfed.core.deprecation import STATE_KEYS
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.detectors import SplitGuard
from splitfed.engines.local import LocalEngine
from splitfed.models.mlp import mlp
from splitfed.schedules.base import Schedule
from splitfed.schedules.blind import Blind
from splitfed.topologies import local, vanilla
from splitfed.training.entry_point import train
from splitfed.training.settings import Adversaries
from tests.examples import assert_same, engine_of, images, toy_data


def small() -> LocalEngine:
    return engine_of(vanilla(mlp((1, 8, 8), 10, (8,)), "relu1"), *images(8))


def with_old_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    old_of_new = {new: old for old, new in STATE_KEYS.items()}
    return {old_of_new.get(key, key): value for key, value in state.items()}


RUNS: dict[str, tuple[Topology, dict[str, Any]]] = {
    "attack and detector": (
        vanilla(mlp((1, 8, 8), 10, (8,)), "relu1"),
        {"adversaries": Adversaries({"server": "sdar"}, detectors={"client": SplitGuard()})},
    ),
    "method": (local(mlp((1, 8, 8), 10, (8,))), {"schedule": "independent", "method": "scaffold"}),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_state_with_the_keys_of_an_earlier_version_is_taken_up(kind: str) -> None:
    topology, given = RUNS[kind]
    data = toy_data(60).clients(1, auxiliary=20, victims=4)
    run = train(topology, data, rounds=1, batch_size=8, optimizer=Optim("SGD", {"lr": 0.1}), **given)
    state = run.engine.state()
    earlier = with_old_keys(state)
    earlier["parties"] = {name: with_old_keys(held) for name, held in state["parties"].items()}
    assert {"insiders", "sentries", "taken"} <= set(earlier)
    assert all("tutor" in held for held in earlier["parties"].values())
    for party in run.engine.parties.values():
        for weight in party.state.parameters:
            weight.data.zero_()
    run.engine.load_state(earlier)
    assert_same(run.engine.state(), state)


@pytest.mark.parametrize(
    ("old", "new"), [("crew", "run_parties"), ("insiders", "training_attacks"), ("sentries", "detectors")]
)
def test_parts_of_an_engine_under_their_old_names(old: str, new: str) -> None:
    engine = small()
    with pytest.warns(DeprecationWarning, match=f"LocalEngine.{old} is now LocalEngine.{new}; the old name"):
        assert getattr(engine, old) is getattr(engine, new)


def test_a_schedule_says_under_the_old_name_whether_clients_are_independent() -> None:
    with pytest.warns(DeprecationWarning, match="Blind.apart is now Blind.independent"):
        assert Blind().apart is False
    with pytest.warns(DeprecationWarning, match="Mine.apart is now independent"):

        @dataclass(frozen=True, kw_only=True)
        class Mine(Schedule):
            @property
            def apart(self) -> bool:
                return False

    assert Mine().independent is False
    assert Schedule().independent is True
