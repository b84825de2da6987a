"""FedPer and LG-FedAvg: what stands before the border is averaged, or what stands behind it; the rest never leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.engines.base import FED
from splitfed.federated import FedPer, LgFedAvg
from splitfed.topologies import local
from tests.federated.examples import go, model, weights

BOTH: dict[str, tuple[Any, str, str]] = {"fedper": (FedPer, "body", "head"), "lg_fedavg": (LgFedAvg, "head", "body")}


@pytest.mark.parametrize("name", BOTH)
def test_one_part_is_averaged_and_the_other_kept(name: str) -> None:
    method, shared, kept = BOTH[name]
    run = go(method(), 2)
    sent = run.method_state["weights"]
    assert {found.partition("/")[0] for found in sent} == {shared}
    rows = torch.tensor([float(run.engine.rows(replica, "train")) for replica in range(3)])
    held = [weights(run, replica) for replica in range(3)]
    for key in (k for k in sent if sent[k].is_floating_point()):
        stacked = torch.stack([h[key] for h in held])
        mean = (stacked * (rows / rows.sum()).reshape(-1, *[1] * (stacked.dim() - 1))).sum(0)
        assert torch.allclose(sent[key], mean, atol=1e-6)
    own = [{k: t for k, t in h.items() if k.startswith(kept)} for h in held]
    assert not any(torch.equal(a, b) for a, b in zip(own[0].values(), own[1].values(), strict=True) if a.numel() > 1)
    # A client predicts with the fused part and its own.
    served = run.engine.modules(1, run.newest(1))
    part = "fc2" if kept == "head" else "fc1"
    assert torch.equal(served[kept].state_dict()[f"{part}.weight"], held[1][f"{kept}/{part}.weight"])
    assert all(torch.equal(served[shared].state_dict()[k.partition("/")[2]], t) for k, t in sent.items())
    expected = sum(t.nbytes for t in sent.values())
    assert run.engine.traffic.bytes(kind="weights") == 2 * 2 * 3 * expected


@pytest.mark.parametrize("name", BOTH)
def test_the_border_can_be_named(name: str) -> None:
    method = BOTH[name][0]
    topology = local(model(), ("fc1", "relu"))
    run = go(method(head="body2"), 1, topology=topology)
    found = {key.partition("/")[0] for key in run.method_state["weights"]}
    assert found == ({"body1"} if name == "fedper" else {"body2", "head"})


def test_lg_fedavg_shares_a_head_between_extractors_of_any_make_and_refuses_other_heads() -> None:
    def pieces(replica: int, hidden: int, width: int = 8) -> Any:
        wide = torch.nn.Sequential()
        for name, layer in model(replica, width).named_children():
            if name == "fc1":
                wide.add_module("fc0", torch.nn.Linear(64, hidden))
                wide.add_module("fc1", torch.nn.Linear(hidden, width))
            else:
                wide.add_module(name, layer)
        return local(wide, ("relu",))

    run = go("lg_fedavg", 2, topology=[pieces(replica, 5 + replica) for replica in range(3)])
    assert {flow.kind for flow in run.engine.traffic.flows if flow.receiver == FED} == {"weights"}
    heads = run.method_state["weights"]
    assert {name: tuple(t.shape) for name, t in heads.items()} == {"head/fc2.weight": (10, 8), "head/fc2.bias": (10,)}
    with pytest.raises(
        InvalidInput, match="lg_fedavg averages every client's head; that of client 2 has another architecture"
    ):
        go("lg_fedavg", 1, topology=[pieces(replica, 5, 8 + replica // 2) for replica in range(3)])
    with pytest.raises(InvalidInput, match="fedper averages every client's base; that of client 1 has another"):
        go("fedper", 1, topology=[pieces(replica, 5 + replica) for replica in range(3)])


def test_fedper_clients_may_have_heads_of_their_own_make() -> None:
    def pieces(replica: int) -> Any:
        net = torch.nn.Sequential()
        for name, layer in model(0).named_children():
            if name == "fc2":
                net.add_module("extra", torch.nn.Linear(8, 6 + replica))
                net.add_module("fc2", torch.nn.Linear(6 + replica, 10))
            else:
                net.add_module(name, layer)
        return local(net, ("relu",))

    run = go("fedper", 1, topology=[pieces(replica) for replica in range(3)])
    assert {name.partition("/")[0] for name in run.method_state["weights"]} == {"body"}
