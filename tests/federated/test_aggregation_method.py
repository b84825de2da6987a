"""Aggregation: own and shown rows are one training set, sent once, drawn in turn, with labels as they were given."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive
from splitfed.defenses import LabelDp
from splitfed.federated.aggregation import PART, Aggregation
from splitfed.federated.public_rows import draw_row_numbers
from splitfed.schedules import Independent
from splitfed.schedules.base import Training
from splitfed.topologies import local, vertical
from tests.examples import assert_same
from tests.federated.methods import (
    BUILDERS,
    assert_nothing_held_twice,
    assert_plan_is_counted,
    assert_resumes,
    go,
    net,
    plan_of,
    weights,
)


@cache
def data(clients: int = 3, **options: Any) -> Any:
    return sf.data.digits().rows(range(120)).clients(clients, auxiliary=4, victims=4, public=0.2, **options)


def test_rows_come_without_repetition_until_all_were_there() -> None:
    whole = draw_row_numbers(5, 7, 0, 21)
    assert [sorted(whole[i : i + 7].tolist()) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert len({tuple(whole[i : i + 7].tolist()) for i in (0, 7, 14)}) == 3
    for first, count in ((0, 3), (5, 4), (6, 9), (20, 1), (14, 0), (0, 0)):
        assert draw_row_numbers(5, 7, first, count).tolist() == whole[first : first + count].tolist()


def test_trains_as_if_shown_rows_were_its_own() -> None:
    rows, topology = data(), local(net())
    run = go("local", Aggregation(), 4, data=rows, topology=topology, schedule=Independent(steps=3))
    for replica, client in enumerate(rows.clients):
        shown = [other.public for other in rows.clients if other is not client]
        union = client.train.join(shown)
        assert run.learners[replica].rows(PART) == len(union)
        model = copy.deepcopy(topology.segments[0].module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for number in range(4):
            seed = derive(0, "aggregation", replica, number)
            for i, batch in enumerate(Independent(steps=3)._batches(Training(16), len(client.train), number, replica)):
                some = draw_row_numbers(seed, len(union), 16 * i, len(batch))
                optimizer.zero_grad()
                functional.cross_entropy(model(union.x[some]), union.y[some]).backward()
                optimizer.step()
        assert_same({f"model/{k}": v for k, v in model.state_dict().items()}, weights(run, replica))


@pytest.mark.parametrize("shape", BUILDERS)
def test_planned_bytes_are_counted_bytes(shape: str) -> None:
    rows = data()
    run = assert_plan_is_counted(shape, Aggregation(), data=rows)
    shown = sum(len(client.public) for client in rows.clients)
    assert run.engine.traffic.bytes(kind="data") == 3 * shown * (64 * 4 + 8), "up once, and down to two others"
    assert run.engine.traffic.bytes() == run.engine.traffic.bytes(kind="data") or shape != "local"


def test_who_comes_later_is_told_then() -> None:
    schedule = Independent(clients_per_round=1)
    run = assert_plan_is_counted("local", Aggregation(), 8, data=data(), schedule=schedule)
    assert {replica: sorted(told) for replica, told in run.method_state["told"].items()}.keys() == {0, 1, 2}
    first = next(iter(run.method_state["told"]))
    assert go("local", Aggregation(), 1, data=data(), schedule=schedule).method_state["told"] == {first: []}


@pytest.mark.parametrize("shape", ["local", "vanilla"])
def test_resumed_run_ends_in_the_same_bits(shape: str, tmp_path: Path) -> None:
    plan = plan_of(shape, clients_per_round=2)
    assert_resumes(shape, Aggregation(), tmp_path / "run", data=data(), schedule=plan)


def test_labels_that_were_made_private_are_not_changed_again() -> None:
    run = go("vanilla", Aggregation(), data=data(2), defenses=LabelDp(epsilon=0.5))
    one, other = run.learners
    out = one.topology.heads[0].value
    assert not torch.equal(one.labels(out), data(2).clients[0].train.y), "the labels are noisy"
    assert torch.equal(one.labels(out, "public"), one.labels(out)[data(2).clients[0].shown])
    expected = torch.cat([one.labels(out), other.labels(out, "public")])
    assert torch.equal(one.labels(out, PART), expected)


def test_no_party_reaches_what_another_holds() -> None:
    assert_nothing_held_twice(go("local", Aggregation(), data=data(2)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": sf.data.digits().clients(2)}, "aggregation needs public rows of every client, and client0 has none"),
        ({"data": data(1)}, "aggregation learns from others' public rows; one client has no others"),
        ({"shape": "vanilla", "schedule": "blind"}, "method Aggregation controls each client's training"),
    ],
)
def test_refused(changes: dict[str, Any], text: str) -> None:
    shape, given = changes.get("shape", "local"), {k: v for k, v in changes.items() if k != "shape"}
    with pytest.raises(InvalidInput, match=text):
        go(shape, Aggregation(), **{"data": data(), **given})


def test_refuses_rows_that_nobody_holds_whole() -> None:
    rows = sf.data.digits().strips(2).clients(1, public=0.1)
    halves = {f"party{i}": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 4)) for i in range(2)}
    with pytest.raises(InvalidInput, match="aggregation needs clients of one party that holds rows and labels"):
        sf.train(vertical(halves, torch.nn.Linear(8, 10), labels="top"), rows, schedule="joint", method="aggregation")
