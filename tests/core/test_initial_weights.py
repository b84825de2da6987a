"""The weights that clients start from: shared or their own, by the seed, broadcast where a method says so, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.local_update import LocalUpdate
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.federated import FedAvg, FedGen, FedKD
from splitfed.planning.validation import prepare
from splitfed.registry import TABLES, load
from splitfed.schedules import Sequential
from splitfed.schedules.base import Training
from splitfed.topologies import local, vanilla
from splitfed.training.run import Run
from splitfed.training.settings import Logging
from tests.examples import assert_same, toy_data
from tests.federated.examples import arguments, check_resumed, go, model, pictures, weights

# Who is sent all that it holds before it trains, and who is sent some segments of its own copy.
EVERYTHING = ("fedavg", "fedsgd", "fedprox", "scaffold", "fednova", "apfl", "pfedme", "per_fedavg", "ifca")
SOME = {
    "fedper": {"body"},
    "lg_fedavg": {"head"},
    "ditto": {"shared_body", "shared_head"},
    "fml": {"meme_body", "meme_head"},
    "fedkd": {"mentee_body", "mentee_head"},
    "fedakt": {"adapter_body"},
}
NOTHING = ("standalone", "fedproto", "feddistill", "mafml", "fedmd", "aggregation")


def shown() -> Any:
    return toy_data(150).clients(3, dirichlet=1.0, minimum=12, auxiliary=8, victims=6, public=0.2, seed=1)


def still(method: Any, **changes: Any) -> Run:
    """Train a round at rate zero: weights stay what they started from."""
    rate = Optim("SGD", {"lr": 0.0})
    return go(method, 1, **{"optimizer": rate, "data": shown(), **changes})


def learnt(run: Run, replica: int) -> dict[str, Tensor]:
    return {n: t for n, t in weights(run, replica).items() if n.endswith((".weight", ".bias")) and ".norm" not in n}


def alike(run: Run) -> set[str]:
    """The segments with the same weights at every client."""
    first = learnt(run, 0)
    others = [learnt(run, replica) for replica in range(1, run.engine.replicas)]
    differ = {n.partition("/")[0] for n, t in first.items() if any(not torch.equal(t, other[n]) for other in others)}
    return {n.partition("/")[0] for n in first} - differ


def test_the_table_below_knows_every_method() -> None:
    listed = {*EVERYTHING, *SOME, *NOTHING, "fedgen"}
    absent = sorted(set(TABLES["methods"]) - listed)
    assert not absent, f"say what {absent} send before the first round: in EVERYTHING, SOME or NOTHING of this file"
    assert listed <= set(TABLES["methods"])


@pytest.mark.parametrize("name", [None, *NOTHING])
def test_own_weights_differ_by_client_and_follow_the_seed(name: str | None) -> None:
    run, again, other = (still(name, local=LocalUpdate(starts="own"), seed=seed) for seed in (0, 0, 1))
    assert alike(run) == set()
    assert run.training.starts == "own"
    for replica in range(3):
        assert_same(learnt(run, replica), learnt(again, replica))
        assert not torch.equal(learnt(run, replica)["head/fc2.weight"], learnt(other, replica)["head/fc2.weight"])


@pytest.mark.parametrize(
    ("name", "starts"),
    [("fedproto", "shared"), *((name, None) for name in (None, "mafml", "fedkd", "ditto", "lg_fedavg"))],
)
def test_shared_weights_are_the_topologys(name: str | None, starts: str | None) -> None:
    run = still(name, local=LocalUpdate(starts=starts))
    assert run.training.starts == "shared"
    for replica in range(3):
        for segment in ("body", "head"):
            for key, tensor in run.engine.topology.segment(segment).module.named_parameters():
                assert torch.equal(weights(run, replica)[f"{segment}/{key}"], tensor.detach())


@pytest.mark.parametrize("name", SOME)
def test_what_a_method_broadcasts_is_alike_and_the_rest_is_not(name: str) -> None:
    run = still(name, local=LocalUpdate(starts="own"))
    assert alike(run) == SOME[name]
    assert run.training.starts == "own"


def test_fedgen_shares_all_or_its_head() -> None:
    assert still(FedGen(), local=LocalUpdate(starts="own")).training.starts == "shared"
    assert alike(still(FedGen(share="head", weight=0.0), local=LocalUpdate(starts="own"))) == {"head"}


@pytest.mark.parametrize("name", EVERYTHING)
def test_where_everything_is_broadcast_that_is_told(name: str) -> None:
    run = still(name, local=LocalUpdate(starts="own"))
    # IFCA sends several models, of which each client takes one.
    assert alike(run) == {s.name for s in run.engine.topology.segments} or name == "ifca"
    assert run.training.starts == "shared"


def test_where_everything_is_broadcast_it_changes_nothing() -> None:
    one, other = (go("fedavg", 2, local=LocalUpdate(starts=starts)) for starts in ("own", "shared"))
    for replica in range(3):
        assert_same(weights(one, replica), weights(other, replica))
    assert (one.training.starts, other.training.starts) == ("shared", "shared")


def test_layers_are_drawn_as_torch_draws_them() -> None:
    """A linear layer of 64 inputs: uniform within 1/8, of deviation 1 / (8 sqrt 3)."""
    run = still(None, local=LocalUpdate(starts="own"), topology=local(model(width=200), ("relu",)))
    for replica in range(3):
        drawn = weights(run, replica)["body/fc1.weight"]
        assert float(drawn.abs().max()) <= 1 / 8
        assert float(drawn.std()) == pytest.approx(1 / (8 * 3**0.5), rel=0.02)


def test_split_clients_have_bottoms_of_their_own_where_the_schedule_leaves_them() -> None:
    def bottoms(schedule: Any) -> Run:
        return still(None, topology=vanilla(model(), "relu"), schedule=schedule, local=LocalUpdate(starts="own"))

    for schedule in ("splitfed_v3", "blind", Sequential(hand_over="none")):
        run = bottoms(schedule)
        assert run.training.starts == "own"
        # The server is one party, with the weights of the topology.
        (server,) = (s.name for s in run.engine.topology.segments if s.role == "server")
        assert alike(run) == {server}
    for schedule in ("splitfed_v1", "splitfed_v2", "sequential"):
        run = bottoms(schedule)
        assert run.training.starts == "shared"
        assert len(alike(run)) == 2


def test_a_private_model_beside_a_split_one_is_a_clients_own() -> None:
    run = still("fml", topology=vanilla(model(), "relu"), schedule="splitfed_v1", local=LocalUpdate(starts="own"))
    names = {s.name for s in run.engine.topology.segments}
    private = {name for name in names if name.startswith("private")}
    assert private
    assert alike(run) & private == set()
    assert run.training.starts == "own"


def test_frozen_layers_stay_and_their_statistics_too() -> None:
    topology = local(model(), ("relu",))
    body: Any = topology.segment(topology.segments[0].name).module
    body.norm.running_mean.fill_(3.0)
    for weight in (*body.norm.parameters(), body.fc1.bias):
        weight.requires_grad_(False)
    run = still(None, topology=topology, local=LocalUpdate(starts="own"))
    assert torch.equal(weights(run, 1)["body/fc1.bias"], body.fc1.bias)
    assert not torch.equal(weights(run, 1)["body/fc1.weight"], body.fc1.weight)


class Bent(nn.Module):
    """A weight that torch knows no way to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * self.scale


def test_what_cannot_be_drawn_is_refused_and_may_be_frozen() -> None:
    with stream(0):
        bent = nn.Sequential(Bent(), nn.Linear(64, 10))
    with pytest.raises(InvalidInput) as caught:
        still(None, topology=local(bent), local=LocalUpdate(starts="own"))
    assert str(caught.value) == (
        "starts='own' cannot draw the weights of Bent in segment 'model' anew (it has no reset_parameters): give one "
        "topology a client"
    )
    bent[0].scale.requires_grad_(False)  # type: ignore[union-attr]
    assert still(None, topology=local(bent), local=LocalUpdate(starts="own")).training.starts == "own"
    # Where it is broadcast nothing is drawn.
    assert (
        still(
            "fedavg", topology=local(nn.Sequential(Bent(), nn.Linear(64, 10))), local=LocalUpdate(starts="own")
        ).training.starts
        == "shared"
    )


def three(width: int = 8) -> list[Topology]:
    return [local(model(seed, width), ("relu",)) for seed in range(3)]


def test_topologies_of_their_own_keep_their_weights_unless_one_state_is_asked_for() -> None:
    given = three()
    for starts in (None, "own"):
        run = still("fedproto", topology=given, local=LocalUpdate(starts=starts))
        assert run.training.starts == (starts or "given")
        for replica in range(3):
            key = "body/fc1.weight"
            assert torch.equal(weights(run, replica)[key], given[replica].segment("body").module.fc1.weight.detach())  # type: ignore[union-attr]
    shared = still("fedproto", topology=given, local=LocalUpdate(starts="shared"))
    assert alike(shared) == {"body", "head"}
    assert torch.equal(weights(shared, 2)["head/fc2.bias"], given[0].segment("head").module.fc2.bias.detach())  # type: ignore[union-attr]
    with pytest.raises(InvalidInput, match="starts='shared' gives every client the weights of the first; those of cli"):
        still(None, topology=[*given[:2], *three(9)[2:]], local=LocalUpdate(starts="shared"))
    # Two clients with one topology, and one with another make.
    mixed = still(None, topology=[given[0], three(9)[1], given[0]], local=LocalUpdate(starts="own"))
    one, third = (weights(mixed, replica)["head/fc2.bias"] for replica in (0, 2))
    assert not torch.equal(one, third)


def test_a_single_client_keeps_the_weights_it_was_given() -> None:
    run = still(None, data=pictures(1), local=LocalUpdate(starts="own"))
    assert run.training.starts == "shared"
    assert torch.equal(weights(run, 0)["head/fc2.bias"], run.engine.topology.segment("head").module.fc2.bias.detach())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["fedper", "fedkd"])
def test_a_resumed_run_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    momentum = Optim("SGD", {"lr": 0.1, "momentum": 0.9})
    given = {"local": LocalUpdate(starts="own"), "optimizer": momentum}
    check_resumed(go(name, 3, **given), load("methods", name)(), tmp_path / "run", **given)


def test_a_run_is_resumed_with_its_own_setting_alone(tmp_path: Path) -> None:
    go("fedproto", 1, logging=Logging(folder=tmp_path), local=LocalUpdate(starts="own"))
    with pytest.raises(InvalidInput, match=r"holds another run: its training\.starts is 'own', not 'shared'"):
        go("fedproto", 1, logging=Logging(folder=tmp_path, resume=True))


def test_it_costs_nothing_that_crosses() -> None:
    one, other = (go(FedKD(rank=2), 2, local=LocalUpdate(starts=starts)) for starts in ("own", "shared"))
    assert one.engine.traffic.flows == other.engine.traffic.flows


def test_what_is_told_before_training_is_what_holds_in_it() -> None:
    given = arguments(data=pictures())
    ready = prepare(**given, defenses=(), training=Training(7, starts="own"), method=FedAvg())
    assert ready.training.starts == "shared"
    ready = prepare(**given, defenses=(), training=Training(7, starts="own"), method="fedproto")
    assert ready.training.starts == "own"
    assert ready.local == [("body", "head")] * 3


@pytest.mark.parametrize("starts", ["owned", "given"])
def test_unknown_starts_are_refused(starts: str) -> None:
    with pytest.raises(InvalidInput, match=f"unknown starts '{starts}'.*own"):
        go("fedproto", local=LocalUpdate(starts=starts))
