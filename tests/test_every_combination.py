"""Every topology with every schedule: it trains on real data and beats chance, or refuses with its reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.random import stream
from splitfed.core.tasks import classification
from splitfed.data.dataset import Federation
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.registry import TABLES, load
from splitfed.schedules.base import Training
from splitfed.topologies import custom, extended_vanilla, local, multi_hop, multi_task, u_shaped, vanilla, vertical

CLIENTS = 3


def net() -> nn.Module:
    return mlp((8, 8), 10, (48, 32, 24), seed=None)


def tops(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def bottoms() -> dict[str, nn.Module]:
    return {side: nn.Sequential(nn.Flatten(), nn.Linear(32, 24)) for side in ("left", "right")}


TOPOLOGIES: dict[str, Callable[[], sf.Topology]] = {
    "vanilla": lambda: vanilla(net(), "relu1"),
    "u_shaped": lambda: u_shaped(net(), ("relu1", "relu3")),
    "vertical": lambda: vertical(bottoms(), tops(48, 10), labels="right"),
    "extended_vanilla": lambda: extended_vanilla(bottoms(), nn.Linear(48, 32), tops(32, 10), labels="right"),
    "multi_task": lambda: multi_task(
        bottoms(), {"digit": tops(48, 10), "parity": tops(48, 2)}, targets={"digit": None, "parity": "parity"}
    ),
    "multi_hop": lambda: multi_hop(net(), ("relu1", "relu2", "relu3")),
    "local": lambda: local(net(), ("relu2",)),
    "custom": lambda: custom(
        [
            # The client's second segment reads what its first made; the server joins both.
            sf.Segment("one", "client", nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()), ("x",), ("a",)),
            sf.Segment("two", "client", nn.Linear(32, 16), ("a",), ("b",)),
            sf.Segment("join", "server", sf.topologies.Fusion("concat"), ("a", "b"), ("c",)),
            sf.Segment("top", "server", tops(48, 10), ("c",), ("out",)),
        ],
        {"x": "client"},
        [sf.Head("out", "server", "client")],
    ),
}
OWN, WHOLE = (f"topology {name!r} has no party without data" for name in ("multi_task", "local"))
REFUSED = {
    ("vertical", "local_loss"): "local_loss trains 'bottom_left' on labels of its own party; role 'left' of topology",
    ("extended_vanilla", "local_loss"): "local_loss trains 'bottom_left' on labels of its own party; role 'left' of",
    ("multi_task", "local_loss"): "local_loss trains 'bottom_left' on labels of its own party; role 'left' of topology",
    ("multi_task", "splitfed_v3"): f"splitfed_v3 averages the server's copies; {OWN}",
    ("multi_task", "blind"): f"a joint step needs a party that all clients share; {OWN}",
    ("multi_task", "sglr"): f"a joint step needs a party that all clients share; {OWN}",
    ("local", "splitfed_v3"): f"splitfed_v3 averages the server's copies; {WHOLE}",
    ("local", "blind"): f"a joint step needs a party that all clients share; {WHOLE}",
    ("local", "sglr"): f"a joint step needs a party that all clients share; {WHOLE}",
    **{
        (
            name,
            "independent",
        ): f"schedule 'independent' trains whole models at their clients; in topology {name!r} all share"
        for name in TOPOLOGIES
        if name not in ("multi_task", "local")
    },
}


@cache
def digits(clients: int) -> Federation:
    data = sf.data.digits()
    parts = data.halves().with_target("parity", data.y % 2, classification(2))
    return parts.clients(clients, auxiliary=0, victims=1, validation=0.0, test=0.2)


def test_no_combination_is_missing() -> None:
    assert set(TOPOLOGIES) == set(TABLES["topologies"])
    assert {name for _, name in REFUSED} <= set(TABLES["schedules"])
    assert {name for name, _ in REFUSED} <= set(TOPOLOGIES)
    assert {name for name, _ in EVERYDAY - set(REFUSED)} == set(TOPOLOGIES)
    assert {name for _, name in EVERYDAY - set(REFUSED)} == set(TABLES["schedules"])


PAIRS = [(name, schedule) for name in TOPOLOGIES for schedule in TABLES["schedules"]]
# A diagonal, which every topology and every schedule is on.
EVERYDAY = {
    (name, schedule)
    for i, name in enumerate(TOPOLOGIES)
    for j, schedule in enumerate(TABLES["schedules"])
    if (i + j) % 8 == 7
}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(*pair, marks=() if pair in REFUSED or pair in EVERYDAY else pytest.mark.exhaustive)
        for pair in PAIRS
    ],
)
def test_trains_or_refuses(name: str, schedule: str) -> None:
    data = digits(1 if schedule == "joint" else CLIENTS)
    with stream(7):
        topology = TOPOLOGIES[name]()

    def run() -> sf.Run:
        plan = load("schedules", schedule)()
        optim = sf.Optim("SGD", {"lr": 0.05, "momentum": 0.9})
        return sf.train(
            topology, data, schedule=plan, rounds=12, batch_size=32, optimizer=optim, evaluation=sf.Evaluation(every=12)
        )

    if (name, schedule) in REFUSED:
        with pytest.raises(sf.InvalidInput) as error:
            run()
        assert str(error.value).startswith(REFUSED[name, schedule])
        return
    try:
        found = run()
    except sf.InvalidInput as refusal:
        pytest.fail(f"REFUSED of this file has no row {(name, schedule)}, and it is refused: {refusal}")
    assert found.accuracy > 0.5, "chance is .1"
    if name == "multi_task":
        heads = found.history[-1]["test"]["heads"]
        assert heads["out_parity"] > 0.7, "chance is .5"
    counted = {flow: n for flow, n in found.engine.traffic.flows.items() if flow.phase == "train"}
    plan = load("schedules", schedule)()
    ready = prepare(topology, data, schedule=plan, defenses=(), optimizer=None, training=Training(32))
    assert cost(ready, 12).flows == counted, "planned, message by message and byte by byte"
    x = data.test_union().x[:5]
    assert found.predict(x, client=len(data.clients) - 1).shape == (5, 10)
    assert bool(torch.isfinite(found.predict(x)).all())


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_joint_refuses_several_clients(name: str) -> None:
    with pytest.raises(sf.InvalidInput, match="schedule 'joint' trains one group of parties on the records they share"):
        sf.train(TOPOLOGIES[name](), digits(CLIENTS), schedule="joint")
