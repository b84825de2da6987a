"""Trained weights go back into the user's own model: exactly, or not at all and in a line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.random import initialization
from splitfed.federated import FML, Apfl, Ditto, FedKD, FedPer, Method
from splitfed.topologies import local, u_shaped, vanilla
from splitfed.training.run import Run
from tests.encryption import training_examples as encrypted
from tests.examples import assert_refuses, assert_same, toy_data


class Net(nn.Module):
    """Batch norm on both sides, and weights that are tied within the client's ends."""

    def __init__(self, seed: int = 0, width: int = 12) -> None:
        super().__init__()
        with initialization(seed):
            self.fc1, self.norm1 = nn.Linear(64, width), nn.BatchNorm1d(width)
            self.fc2, self.norm2 = nn.Linear(width, width), nn.BatchNorm1d(width)
            self.fc3 = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.fc1(x.flatten(1))))
        return self.fc3(torch.relu(self.norm2(self.fc2(h))))


def go(topology: Any, clients: int = 2, **more: Any) -> Run:
    data = toy_data(80).clients(clients, auxiliary=8, victims=4)
    return sf.train(topology, data, rounds=2, batch_size=20, **more)


@pytest.mark.parametrize("shape", ["vanilla", "u_shaped"])
@pytest.mark.parametrize("schedule", ["sequential", "splitfed_v1"])
def test_the_exported_model_answers_as_the_run_does(shape: str, schedule: str) -> None:
    run = go(vanilla(Net(), "norm1") if shape == "vanilla" else u_shaped(Net(), ("norm1", "norm2")), schedule=schedule)
    fresh = Net(seed=9)
    before = run.state_dict()
    assert run.export(fresh) is fresh
    x = run.data.clients[0].test.x
    with torch.no_grad():
        assert torch.equal(fresh.eval()(x), run.predict(x))
        assert not torch.equal(Net(seed=0).eval()(x), run.predict(x)), "it has learnt"
        fresh.fc1.weight.zero_()
        for tensor in run.state_dict(0).values():
            tensor.zero_()
    assert_same(run.state_dict(), before)


def test_where_clients_differ_one_is_to_be_named() -> None:
    """Batch-norm statistics stay with their client."""
    run = go(vanilla(Net(), "norm1"), schedule=sf.schedules.SplitFedV1(buffers=False))
    assert_refuses(
        run.state_dict,
        "clients 0 and 1 use different weights ('norm1.running_mean' and 1 more): say whose, client=0 to 1",
    )
    one, two = (run.export(Net(seed=5), client=client).eval() for client in (0, 1))
    x = run.data.clients[0].test.x
    assert torch.equal(one(x), run.predict(x, client=0))
    assert torch.equal(two(x), run.predict(x, client=1))
    assert not torch.equal(one(x), two(x))
    for wrong, named in ((2, "0 to 1"), (-1, "0 to 1"), (True, "a whole number or None"), ("0", "a whole number")):
        assert_refuses(lambda wrong=wrong: run.state_dict(wrong), f"client={wrong!r} is not allowed; expected {named}")


def test_a_method_that_personalises_is_exported_by_client() -> None:
    run = go(local(Net(), cuts=["norm2"]), schedule="independent", method=FedPer())
    assert_refuses(lambda: run.export(Net()), "clients 0 and 1 use different weights")
    x = run.data.clients[1].test.x
    assert torch.equal(run.export(Net(), 1).eval()(x), run.predict(x, client=1))


@pytest.mark.parametrize("shape", ["local", "u_shaped"])
@pytest.mark.parametrize(
    "method", [Ditto(), Apfl(alpha=0.3, learns="never"), FedKD(rank=2), FML()], ids=lambda method: type(method).__name__
)
def test_a_second_model_is_no_part_of_what_a_client_answers_with(method: Method, shape: str) -> None:
    topology = local(Net(), cuts=["norm1"]) if shape == "local" else u_shaped(Net(), ("norm1", "norm2"))
    schedule = "independent" if shape == "local" else sf.schedules.Sequential(hand_over="none")
    run = go(topology, schedule=schedule, method=method)
    assert list(run.state_dict(client=1)) == list(topology.state_dict())
    x = run.data.clients[1].test.x
    with torch.no_grad():
        torch.testing.assert_close(run.export(Net(seed=9), client=1).eval()(x), run.predict(x, client=1))


def test_another_model_is_refused_and_left_as_it_was() -> None:
    run = go(vanilla(Net(), "norm1"), clients=1)
    wide, small = Net(width=13), nn.Linear(64, 10)
    before = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    assert_refuses(lambda: run.export(wide), "'fc1.weight' has shape (12, 64) in the run and (13, 64) in Net")
    assert_same(dict(wide.state_dict()), before)
    assert_refuses(lambda: run.export(small), "the run has trained 'fc1.weight' and 15 more, which Linear has not")
    more = Net()
    more.fc4 = nn.Linear(2, 2)
    assert_refuses(lambda: run.export(more), "Net has 'fc4.weight' and 1 more, which the run has not trained")
    less = Net()
    del less.fc3
    assert_refuses(lambda: run.export(less), "the run has trained 'fc3.weight' and 1 more, which Net has not")
    assert_refuses(lambda: run.export(Net), "is not allowed; expected the torch.nn.Module that was cut")  # type: ignore[type-var]


def test_layers_of_a_defense_are_no_part_of_the_users_model() -> None:
    run = go(vanilla(Net(), "norm1"), clients=1, defenses=sf.defenses.Mid())
    assert_refuses(lambda: run.export(Net()), "which Net has not: a layer that a method or a defense put in")
    assert [name for name in run.state_dict() if ".layers." in name]


def test_shares_of_an_encrypted_layer_are_exported_as_one_layer() -> None:
    few = encrypted.rows(each=12)
    run = encrypted.train(sf.Encryption(), data=few, rounds=1)
    plain = encrypted.train(None, data=few, rounds=1)
    exported, undivided = (one.export(encrypted.model()).state_dict() for one in (run, plain))
    assert list(exported) == list(undivided)
    # Two steps at a rate of .05, each of whose decrypted numbers is that far off.
    bound = 5 * sf.Encryption().precision
    assert all(float((exported[n] - undivided[n]).abs().max()) < bound for n in undivided)
    moved = encrypted.model().state_dict()["middle.weight"]
    assert float((undivided["middle.weight"] - moved).abs().max()) > 2 * bound, "what the server's share alone would be"
