"""Parties that hold different columns: a server adds, or puts side by side, what it cannot read."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.data.dataset import Federation
from splitfed.encryption.weight_shares import merge_weight_shares
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.topologies import vertical

CLOSE = 2e-5
WIDE = 4


def columns(parties: int) -> Federation:
    few = sf.data.breast_cancer().rows(range(60)).vertical(parties)
    return few.clients(1, auxiliary=8, victims=4, validation=0.0, test=0.2, seed=0)


def vertical_topology(
    data: Federation, settings: sf.Encryption | None, parties: int, fusion: str, top: bool
) -> sf.Topology:
    """Return a bottom a party, a joint layer at the server, and a head at the first party, which has the labels."""
    widths = [feature.shape[0] for feature in data.clients[0].train.features.values()]
    torch.manual_seed(0)
    bottoms = {f"party{i}": nn.Sequential(nn.Linear(width, WIDE), nn.Tanh()) for i, width in enumerate(widths)}
    joined = WIDE if fusion != "concat" else WIDE * parties
    layer, out = (nn.Linear(joined, 3), 3) if top else (nn.Identity(), joined)
    head = nn.Sequential(nn.Tanh(), nn.Linear(out, 1))
    topology = vertical(bottoms, layer, labels="party0", fusion=fusion, head=head)
    return replace(topology, computation=settings)


def train(settings: sf.Encryption | None, parties: int = 2, fusion: str = "sum", top: bool = True) -> sf.Run:
    data = columns(parties)
    topology = vertical_topology(data, settings, parties, fusion, top)
    return sf.train(topology, data, schedule="joint", rounds=2, batch_size=16)


def settings(parties: int, **changes: Any) -> sf.Encryption:
    holders = [f"party{i}" for i in range(parties)]
    return sf.Encryption(**{"key_holder": holders, "keys": "shared", "bound": 16.0, "precision": 1e-2, **changes})


@cache
def encrypted(parties: int, fusion: str, top: bool) -> sf.Run:
    return train(settings(parties), parties, fusion, top)


@pytest.mark.parametrize(("parties", "fusion", "top"), [(2, "sum", False), (3, "sum", True), (2, "concat", True)])
def test_a_server_joins_what_it_cannot_read(parties: int, fusion: str, top: bool) -> None:
    plain, hidden = train(None, parties, fusion, top), encrypted(parties, fusion, top)
    states = []
    for run in (plain, hidden):
        modules = {n: m for party in run.engine.parties.values() for n, m in party.state.modules.items()}
        states.append(merge_weight_shares(run.engine.topology, modules))
    first, second = states
    assert list(first) == list(second)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < CLOSE
    assert hidden.utility == pytest.approx(plain.utility)
    received = [flow for flow in hidden.engine.traffic.counters if flow[3] == "server"]
    assert {flow[1] for flow in received} == {"activation", "gradient", "public context"}


def test_the_server_of_a_vertical_run_gets_ciphertexts_alone() -> None:
    run = encrypted(2, "concat", True)
    view = run.observe("server")
    assert view.messages
    assert {t.dtype for m in view.messages for t in m.tensors.values()} == {torch.uint8}
    assert {m.sender for m in view.messages} == {"party0_0", "party1_0"}


@pytest.mark.parametrize(("parties", "fusion", "top"), [(3, "sum", True), (2, "concat", True), (2, "sum", False)])
def test_planned_messages_of_a_vertical_run_are_those_counted(parties: int, fusion: str, top: bool) -> None:
    run = encrypted(parties, fusion, top)
    counted = {flow: found for flow, found in run.engine.traffic.flows.items() if flow.phase == "train"}
    data = columns(parties)
    ready = prepare(
        vertical_topology(data, settings(parties), parties, fusion, top),
        data,
        schedule="joint",
        defenses=(),
        optimizer=None,
        training=Training(16),
    )
    planned = cost(ready, 2).flows
    assert {flow: messages for flow, (messages, _) in planned.items()} == {f: n for f, (n, _) in counted.items()}
    for flow, (_, nbytes) in counted.items():
        assert planned[flow][1] == pytest.approx(nbytes, rel=0.01), flow


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"key_holder": ["party0"]}, {}, "has 2 roles beside party0"),
        ({"protocol": "plain_gradient", "accept_leak": True}, {}, "has one key holder; party0, party1 were given"),
        ({}, {"fusion": "mean"}, "joins 2 values by Fusion; on ciphertexts they can be added"),
        ({"parameters": "sums"}, {}, "take 1 multiplications in sequence"),
    ],
)
def test_what_cannot_be_joined_is_refused(changes: dict[str, Any], options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told) as error:
        train(settings(2, **changes), **options)
    assert "\n" not in str(error.value)
