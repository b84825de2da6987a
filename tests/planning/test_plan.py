"""What is planned is what is counted: every flow of every schedule, message by message and byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.core.local_update import LocalUpdate
from splitfed.core.topology import Topology
from splitfed.costs.speeds import Machine, Speeds
from splitfed.data.dataset import Federation
from splitfed.models.lenet import lenet
from splitfed.planning.plan import Cost, compare, cost, federated_bytes
from splitfed.planning.validation import Prepared, prepare
from splitfed.registry import TABLES, load
from splitfed.schedules.base import Schedule, Training
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.entry_point import train
from splitfed.training.settings import Evaluation
from tests.examples import SmallUNet, toy_data
from tests.federated.examples import EXAMPLE_PASSES, shared_probes
from tests.thinning import thin

TOPOLOGIES: dict[str, Callable[[], Topology]] = {
    "vanilla": lambda: vanilla(lenet((1, 8, 8), 10), "pool1"),
    "u_shaped": lambda: u_shaped(SmallUNet(), ("pool1", "up2")),
}
OPTIONS: dict[str, list[dict[str, object]]] = {
    "sequential": [{}, {"hand_over": "server"}, {"hand_over": "none"}],
    "alternate": [{}, {"hand_over": "server"}],
    "blind": [{}, {"average": True}],
    "local_loss": [{}, {"server": "shared"}],
    "splitfed_v1": [{}, {"buffers": False}, {"quorum": 2}],
}
CHANCES: list[dict[str, object]] = [{}, {"clients_per_round": 2}, {"drop_out": 0.4}]
MACHINES = Speeds(Machine(1e9, 1e6, 2e6, 0.01), {"server": Machine(1e10, 1e7, 1e7, 0.001)})


@cache
def topology(shape: str) -> Topology:
    return TOPOLOGIES[shape]()


@cache
def federation(clients: int, rows: int = 150) -> Federation:
    return toy_data(rows).clients(clients, victims=4, auxiliary=4, dirichlet=2.0 if clients > 1 else None)


def ready(topology: Topology, plan: Schedule, data: Federation) -> Prepared:
    given: dict[str, Any] = {
        "defenses": (),
        "optimizer": None,
        "training": Training(10, local_epochs=2),
        "example_passes": EXAMPLE_PASSES,
    }
    return prepare(topology, data, schedule=plan, **given)


@pytest.mark.parametrize(
    ("shape", "chance"),
    [
        # A U-Net takes most of the time; which clients are drawn does not depend on it.
        pytest.param(s, c, marks=pytest.mark.exhaustive if s == "u_shaped" and c else (), id=f"{s}-{c}")
        for s in TOPOLOGIES
        for c in CHANCES
    ],
)
@pytest.mark.parametrize("name", thin([n for n in TABLES["schedules"] if n not in ("joint", "independent")], 2))
def test_planned_equals_counted(name: str, shape: str, chance: dict[str, object]) -> None:
    data = federation(3, 80)
    for options in OPTIONS.get(name, [{}]):
        plan = load("schedules", name)(**options, **chance)
        planned = cost(ready(topology(shape), plan, data), 2)
        with shared_probes():
            run = train(
                topology(shape), data, schedule=plan, rounds=2, batch_size=10, local=LocalUpdate(local_epochs=2)
            )
        counted = {flow: n for flow, n in run.engine.traffic.flows.items() if flow.phase == "train"}
        assert planned.flows == counted
        assert planned.bytes == run.bytes > 0


def test_the_clock_beside_training_shows_what_was_planned() -> None:
    data = federation(3)
    for name in ("sequential", "splitfed_v1", "blind"):
        plan = load("schedules", name)()
        planned = cost(ready(topology("vanilla"), plan, data), 2, MACHINES)
        run = train(
            topology("vanilla"),
            data,
            schedule=plan,
            rounds=2,
            batch_size=10,
            local=LocalUpdate(local_epochs=2),
            evaluation=Evaluation(speeds=MACHINES),
        )
        assert run.history[-1]["simulated_seconds"] == pytest.approx(planned.seconds, rel=1e-12)
        assert 0 < run.history[0]["simulated_seconds"] < run.history[1]["simulated_seconds"]


def test_parallel_clients_take_less_time_than_clients_in_turn() -> None:
    data = federation(3)
    seconds = {
        name: cost(ready(topology("vanilla"), load("schedules", name)(), data), 1, MACHINES).seconds
        for name in ("sequential", "splitfed_v1", "local_loss")
    }
    assert seconds["local_loss"] < seconds["splitfed_v1"] < seconds["sequential"]  # type: ignore[operator]


def test_every_schedule_is_compared_and_a_refusal_has_its_reason() -> None:
    data = federation(3)
    found = compare(lambda name: ready(topology("vanilla"), load("schedules", name)(), data), 1)
    assert list(found) == list(TABLES["schedules"])
    refused = {name for name, entry in found.items() if isinstance(entry, InvalidInput)}
    assert refused == {"joint", "independent"}
    assert all(isinstance(entry, Cost) for name, entry in found.items() if name not in refused)


def test_costs_of_one_client_by_hand() -> None:
    """One batch of all rows: 3 messages; every party's share of the bytes is all of them with a single client."""
    data = federation(1)
    rows = len(data.clients[0].train)
    prepared = prepare(
        topology("vanilla"), data, schedule="joint", defenses=(), optimizer="Adam", training=Training(1000)
    )
    found = cost(prepared, 1)
    z = 6 * 4 * 4 * 4  # LeNet's first pooling on 8x8: 6 maps of 4x4 floats
    assert found.messages == 3
    assert found.by_kind == {"activation": z * rows, "gradient": z * rows, "label": 8 * rows}
    assert found.client_bytes(0) == found.bytes
    parameters = 6 * 25 + 6
    assert found.memory["client"].weights == 4 * parameters
    assert found.memory["client"].optimizer == 2 * 4 * parameters
    whole = sum(p.numel() for s in prepared.topology.segments for p in s.module.parameters())
    assert federated_bytes(prepared, 5) == 2 * 4 * whole * 5
