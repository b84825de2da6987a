"""FedSGD: one step on the averaged gradient, however the rows are cut into batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from splitfed.core.optimizers import Optim
from splitfed.engines.base import FED
from splitfed.federated import FedSgd
from splitfed.schedules import Independent
from splitfed.topologies import local
from tests.federated.examples import common, go, hand, model, own, pictures, weights
from tests.rounding import single


def test_a_round_by_hand() -> None:
    # The gradients at 2 are 2 (2 - 1) = 2 and 2 (2 + 3) = 10; no client moves.
    run = hand("fedsgd")
    assert common(run) == single(2 - 0.1 * (0.75 * 2 + 0.25 * 10))
    assert [own(run, 0), own(run, 1)] == [2.0, 2.0]
    assert common(hand(FedSgd(rate=1.0))) == single(2 - 4)
    assert common(hand(FedSgd(weighted=False))) == single(2 - 0.1 * (2 + 10) / 2)


def test_it_is_one_full_step_on_all_rows() -> None:
    data = pictures()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.warns(UserWarning, match=r"momentum=0.9 of 'client' has no effect"):
        run = go("fedsgd", 1, topology=local(net), optimizer=Optim("SGD", {"lr": 0.1, "momentum": 0.9}))
    x, y = (torch.cat([getattr(client.train, name) for client in data.clients]) for name in ("x", "y"))
    nn.functional.cross_entropy(net(x), y).backward()
    expected = net[1].weight.detach() - 0.1 * net[1].weight.grad
    assert torch.allclose(run.method_state["weights"]["model/1.weight"], expected, atol=1e-6)
    assert run.history[0]["steps"] > 3, "in several batches a client"


def test_no_client_moves_its_weights_but_statistics_are_averaged() -> None:
    run = go("fedsgd", 1)
    start = model().state_dict()
    assert torch.equal(weights(run, 0)["head/fc2.weight"], start["fc2.weight"])
    found = run.method_state["weights"]["body/norm.running_mean"]
    rows = torch.tensor([float(run.engine.rows(replica, "train")) for replica in range(3)])
    means = torch.stack([weights(run, replica)["body/norm.running_mean"] for replica in range(3)])
    assert torch.allclose(found, (means * (rows / rows.sum())[:, None]).sum(0), atol=1e-6)
    kinds = run.engine.traffic.by_kind()
    assert kinds["weight gradient"] == 3 * 4 * sum(p.numel() for p in model().parameters())
    assert "weight gradient" in {flow.kind for flow in run.engine.traffic.flows if flow.receiver == FED}


def test_some_batches_a_round() -> None:
    run = hand("fedsgd", schedule=Independent(steps=1), clients=((2, 1.0), (2, -3.0)))
    assert run.history[0]["steps"] == 2
    assert common(run) == single(2 - 0.1 * (2 + 10) / 2)
