"""FedMD: rounds beside a bare loop, no labels in digesting, what crosses, exact resume, refusals."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive
from splitfed.federated.fedmd import PART, FedMD
from splitfed.federated.mafml import MAFML
from splitfed.federated.public_rows import draw_row_numbers, split_batches
from splitfed.schedules import Independent, Sequential
from splitfed.schedules.base import Training
from splitfed.topologies import local
from tests.examples import assert_same, toy_data
from tests.federated.examples import go as beside
from tests.federated.methods import (
    BUILDERS,
    assert_nothing_held_twice,
    assert_plan_is_counted,
    assert_resumes,
    counted,
    go,
    net,
    weights,
)

TURNS = Sequential(hand_over="none")


@cache
def data(clients: int = 3, **options: Any) -> Any:
    return sf.data.digits().rows(range(120)).clients(clients, auxiliary=4, victims=4, public=0.2, **options)


def pictures_shown() -> Any:
    return toy_data(150).clients(3, dirichlet=1.0, minimum=12, auxiliary=8, victims=6, seed=1, public=0.2)


def plan(shape: str) -> Any:
    return Independent() if shape == "local" else TURNS


def by_hand(model: nn.Module, rows: Any, rounds: int, method: FedMD, merged: tuple[str, ...] = ()) -> list[nn.Module]:
    """Train whole models as the head of the method's file says, in plain PyTorch.

    `merged`: layers that a server has a copy of for each client, whose mean takes their place after digesting and after
    local training.
    """
    public = rows.clients[0].public.join(client.public for client in rows.clients[1:])
    models = [copy.deepcopy(model) for _ in rows.clients]
    optimizers, others = ([torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models] for _ in range(2))
    digesting = others if method.separate else optimizers
    training, size = Training(16), method.rows or len(public)

    def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def merge() -> None:
        for layer in merged:
            for copies in zip(*(m.get_submodule(layer).parameters() for m in models), strict=True):
                mean = torch.stack([p.detach() for p in copies]).mean(0)
                for p in copies:
                    p.data.copy_(mean)

    for number in range(rounds):
        chosen = draw_row_numbers(derive(0, "fedmd"), len(public), number * size, size)
        mean = torch.stack([m(public.x[chosen]).detach() for m in models]).mean(0)
        for replica, m in enumerate(models):
            for turn in range(method.transfer if number == 0 else 0):
                seed = derive(0, "fedmd transfer", replica)
                for some in draw_row_numbers(seed, len(public), turn * len(public), len(public)).split(method.batch):
                    step(optimizers[replica], functional.cross_entropy(m(public.x[some]), public.y[some]))
            for turn in range(method.passes if number > 0 else 0):
                seed = derive(0, "fedmd digest", replica, number)
                for some in draw_row_numbers(seed, size, turn * size, size).split(method.batch):
                    z = m(public.x[chosen[some]])
                    apart = (z - mean[some]).abs().mean()
                    if method.distance == "kl":
                        teachers = mean[some].softmax(1)
                        apart = functional.kl_div(z.log_softmax(1), teachers, reduction="batchmean")
                    step(digesting[replica], apart)
        merge()
        for replica, (m, client) in enumerate(zip(models, rows.clients, strict=True)):
            for batch in training.batches(len(client.train), number, replica):
                step(optimizers[replica], functional.cross_entropy(m(client.train.x[batch]), client.train.y[batch]))
        merge()
    return models


@pytest.mark.parametrize(
    "method",
    [
        FedMD(batch=8),
        FedMD(batch=8, separate=True),
        FedMD(rows=10, batch=4, passes=2, transfer=0),
        FedMD(batch=10, transfer=2, distance="kl"),
    ],
    ids=str,
)
def test_rounds_beside_a_bare_loop(method: FedMD) -> None:
    rows, topology = data(), local(net())
    run = go("local", method, 3, data=rows, topology=topology)
    for replica, model in enumerate(by_hand(topology.segments[0].module, rows, 3, method)):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(weights(run, replica)[f"model/{name}"], tensor, rtol=1e-4, atol=1e-6)


def test_server_copies_digest_and_are_averaged(tmp_path: Path) -> None:
    """Under SplitFed v3 there is a server a client, in local training and in digesting."""
    method, given = FedMD(batch=8), {"data": data(), "schedule": "splitfed_v3"}
    run = go("vanilla", method, 3, **given)
    for replica, model in enumerate(by_hand(net(), given["data"], 3, method, ("fc2", "fc3"))):
        found = {name.partition("/")[2]: tensor for name, tensor in weights(run, replica).items()}
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    assert_plan_is_counted("vanilla", method, **given)
    assert_resumes("vanilla", method, tmp_path / "run", **given)


def test_a_first_round_without_transfer_is_training_alone() -> None:
    rows = data()
    one, other = (go("local", method, 1, data=rows) for method in (FedMD(transfer=0), None))
    for replica in range(3):
        assert_same(weights(one, replica), weights(other, replica))


@pytest.mark.parametrize("shape", BUILDERS)
def test_planned_bytes_are_counted_bytes(shape: str) -> None:
    rows = data()
    run = assert_plan_is_counted(shape, FedMD(rows=12, batch=5), data=rows, schedule=plan(shape))
    # Two rounds with scores: 12 rows of 10 numbers up and down, of three clients.
    assert run.engine.traffic.bytes(kind="soft labels") == 2 * 3 * 2 * 12 * 10 * 4
    assert run.engine.traffic.bytes(kind="data") == 3 * sum(len(c.public) for c in rows.clients) * (64 * 4 + 8)


def test_rows_in_several_messages_are_planned() -> None:
    rows = sf.data.digits().clients(2, auxiliary=0, victims=1, public=0.4)
    assert sum(len(client.public) for client in rows.clients) > 512
    assert_plan_is_counted("vanilla", FedMD(batch=400), 2, data=rows, schedule=TURNS)


def test_a_single_row_that_is_left_joins_the_batch_before() -> None:
    assert [len(some) for some in split_batches(torch.arange(9), 4)] == [4, 5]
    assert [len(some) for some in split_batches(torch.arange(10), 4)] == [4, 4, 2]
    assert [len(some) for some in split_batches(torch.arange(3), 1)] == [1, 1, 1]
    assert [len(some) for some in split_batches(torch.arange(1), 4)] == [1]
    # Batch norm takes no row alone: five rows a round are four and one.
    run = beside(FedMD(rows=5, batch=4), rounds=2, data=pictures_shown(), batch_size=6)
    assert len(run.history) == 2
    for method in (FedMD(rows=1), FedMD(batch=1), MAFML(batch=1)):
        with pytest.raises(InvalidInput, match="on a single public row, and batch norm in segment 'body' needs 2 or"):
            beside(method, data=pictures_shown(), batch_size=6)


def test_no_labels_cross_to_digest() -> None:
    rows = data()
    run = go("vanilla", FedMD(transfer=0), 3, data=rows, schedule=TURNS)
    labels = sum(n for flow, (_, n) in counted(run).items() if flow.kind == "label")
    assert labels == 3 * sum(len(client.train) for client in rows.clients) * 8, "those of three epochs of own rows"


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("shape", ["local", "u_shaped"])
def test_resumed_run_ends_in_the_same_bits(shape: str, separate: bool, tmp_path: Path) -> None:
    assert_resumes(
        shape, FedMD(rows=8, batch=6, separate=separate), tmp_path / "run", data=data(), schedule=plan(shape)
    )


def test_a_separate_optimizer_state_is_restarted_with_the_other() -> None:
    rows = data()
    party = go("local", FedMD(separate=True), 2, data=rows).engine.party(0, "client")
    with party.state.separate_optimizer("digest"):
        assert party.state.momentum()
    party.state.restart()
    with party.state.separate_optimizer("digest"):
        assert not party.state.momentum()
    runs = [
        go("local", FedMD(separate=separate, transfer=0), 3, data=rows, local=sf.LocalUpdate(restart_optimizers=True))
        for separate in (False, True)
    ]
    assert any(not a.equal(b) for a, b in zip(weights(runs[0], 0).values(), weights(runs[1], 0).values(), strict=True))


def test_steps_with_a_state_of_their_own_leave_that_of_others() -> None:
    party = go("local", None, 1, optimizer="SGD", data=data()).engine.party(0, "client")
    own = {name: held.clone() for name, held in party.state.momentum().items()}
    with party.state.separate_optimizer("other"):
        assert party.state.momentum() == {}
    assert_same(party.state.momentum(), own)


def test_sampled_clients_meet_when_they_come() -> None:
    schedule = Independent(clients_per_round=2, drop_out=0.3)
    run = assert_plan_is_counted("local", FedMD(batch=8), 6, data=data(4), schedule=schedule)
    assert sorted(run.method_state["met"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", BUILDERS)
def test_no_party_reaches_what_another_holds(shape: str) -> None:
    assert_nothing_held_twice(go(shape, FedMD(), 2, data=data(2), schedule=plan(shape)))


def test_digesting_brings_class_scores_together() -> None:
    """Clients that know three digits each come to agree more on public rows than those that train alone."""

    def spread(method: FedMD) -> float:
        rows = sf.data.digits().rows(range(300)).clients(3, auxiliary=0, victims=0, classes_per_client=4, public=0.3)
        topologies = [local(net(seed)) for seed in range(3)]
        run = go("local", method, 6, data=rows, topology=topologies)
        scores = torch.stack([one.compute("out", PART) for one in run.learners])
        return float(scores.softmax(2).std(0).mean())

    assert spread(FedMD(passes=3, batch=8)) < 0.8 * spread(FedMD(rows=1, batch=1))


def test_batch_norm_waits_for_a_second_public_row() -> None:
    """A client that is alone in the first round and shows one row goes through the rows when others have come."""
    rows = sf.data.digits().rows(range(60)).clients(3, auxiliary=4, victims=4, public=0.08)
    assert [len(client.public) for client in rows.clients] == [1, 1, 1]
    normed = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    given = {"data": rows, "topology": local(normed), "schedule": Independent(clients_per_round=1), "batch_size": 4}
    asked = [go("local", FedMD(batch=8), rounds, **given).method_state["met"] for rounds in (1, 8)]
    assert asked[0] == []
    assert sorted(asked[1]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": sf.data.digits().clients(2)}, "fedmd needs public rows of every client, and client0 has none"),
        ({"data": data(1)}, "fedmd learns from others' public rows; one client has no others"),
        (
            {"schedule": "splitfed_v1"},
            "method FedMD also trains clients outside of the schedule's round, and SplitFedV1 replaces",
        ),
    ],
)
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        go("local", FedMD(), **{"data": data(), **changes})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch": 0}, "fedmd batch=0"),
        ({"passes": 0}, "fedmd passes=0"),
        ({"transfer": -1}, "fedmd transfer=-1"),
        ({"rows": 0}, "fedmd rows=0"),
        ({"distance": "l3"}, "unknown fedmd distance 'l3'; did you mean 'l1'"),
    ],
)
def test_parameters_out_of_range_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        FedMD(**arguments)
