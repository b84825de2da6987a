"""Batch norm over clients: statistics averaged with the weights, or each client's own; a server's averaged always."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from splitfed.engines.base import FED
from splitfed.engines.local import LocalEngine
from splitfed.schedules.base import Training
from splitfed.schedules.splitfed_v1 import SplitFedV1
from splitfed.topologies import vanilla
from tests.examples import engine_of, images


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 12),
            nn.BatchNorm1d(12),
            nn.Tanh(),
            nn.Linear(12, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 10),
        )


def trained(plan: SplitFedV1) -> LocalEngine:
    x, y = images(40)
    x[20:] *= 3  # so that the two clients' statistics differ
    topology = vanilla(net(), "3")
    engine = engine_of(topology, x, y, replicas=2, placement=plan.placement(topology))
    plan.round(engine, Training(10), 0, {})
    return engine


def test_statistics_are_averaged_like_weights_and_counts_are_not() -> None:
    engine = trained(SplitFedV1())
    own = [engine.party(replica, "client").state.modules["bottom"].state_dict() for replica in range(2)]
    fed = engine.parties[FED].state.modules["bottom"].state_dict()
    for name in ("2.running_mean", "2.running_var", "2.weight", "1.weight"):
        assert not torch.equal(own[0][name], own[1][name])
        torch.testing.assert_close(fed[name], (own[0][name] + own[1][name]) / 2)
    assert fed["2.num_batches_tracked"] == 2
    copies = [engine.party(replica, "server").state.modules["top"].state_dict() for replica in range(2)]
    merged = engine.parties["server"].state.modules["top"].state_dict()
    torch.testing.assert_close(merged["5.running_var"], (copies[0]["5.running_var"] + copies[1]["5.running_var"]) / 2)


def test_kept_statistics_do_not_cross_and_serve_their_own_client() -> None:
    plan = SplitFedV1(buffers=False)
    engine = trained(plan)
    sizes = {
        name: sum(t.numel() * t.element_size() for t in tensors)
        for name, tensors in {
            "all": engine.topology.segment("bottom").module.state_dict().values(),
            "weights": list(engine.topology.segment("bottom").module.parameters()),
        }.items()
    }
    assert engine.traffic.bytes(kind="weights") == 4 * sizes["weights"] < 4 * sizes["all"]
    fed = engine.parties[FED].state.modules["bottom"].state_dict()
    assert torch.equal(fed["2.running_mean"], torch.zeros(12)), "the aggregation server never saw any"
    for replica in range(2):
        own = engine.party(replica, "client").state.modules["bottom"].state_dict()
        used = engine.modules(replica, plan.newest(replica, {}))["bottom"].state_dict()
        assert torch.equal(used["2.running_mean"], own["2.running_mean"])
        assert torch.equal(used["2.weight"], fed["2.weight"])
    before = {name: t.clone() for name, t in engine.party(0, "client").state.modules["bottom"].state_dict().items()}
    engine.predict(0, "train", "evaluate", borrow=FED)
    after = engine.party(0, "client").state.modules["bottom"].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "scoring leaves a client as it was"


@pytest.mark.parametrize("buffers", [True, False])
def test_the_next_round_starts_from_the_average(buffers: bool) -> None:
    plan = SplitFedV1(buffers=buffers)
    engine = trained(plan)
    engine.download([0, 1], 1)
    weights = [engine.party(replica, "client").state.modules["bottom"].state_dict() for replica in range(2)]
    assert torch.equal(weights[0]["2.weight"], weights[1]["2.weight"])
    assert torch.equal(weights[0]["2.running_mean"], weights[1]["2.running_mean"]) == buffers
