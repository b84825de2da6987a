"""FedDistill: what each client is sent and how it pulls, by hand; limit cases, bytes, exact resume, refusals."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording, Stamp
from splitfed.federated import FedDistill
from splitfed.federated.feddistill import Follow, class_means
from splitfed.topologies import local
from tests.examples import assert_same
from tests.federated.examples import traits
from tests.federated.methods import ByHand, assert_plan_is_counted, assert_resumes, data, go, net, plan_of, weights
from tests.rounding import single

STAMP = Stamp("train", 0, 0, 0)


def test_means_by_class() -> None:
    found = class_means(torch.tensor([[0.0, 2.0], [4.0, 4.0], [1.0, 0.0]]), torch.tensor([1, 1, 0]))
    assert {label: mean.tolist() for label, mean in found.items()} == {"0": [1.0, 0.0], "1": [2.0, 3.0]}


class Heard:
    """A client that notes what it is sent; there is no local objective, as in a plan."""

    topology = local(net())

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.got: dict[str, Any] = {}

    def objective(self, role: str) -> None:
        return None

    def receive(self, kind: str, tensors: dict[str, Tensor], number: int, role: str) -> dict[str, Tensor]:
        assert (kind, role) == ("soft labels", "client")
        self.got = {label: mean.tolist() for label, mean in tensors.items()}
        return tensors


def test_clients_are_sent_the_mean_of_the_others() -> None:
    means = {
        "0": {"3": torch.tensor([1.0]), "10": torch.tensor([7.0])},
        "1": {"3": torch.tensor([2.0])},
        "2": {"3": torch.tensor([6.0]), "4": torch.tensor([9.0])},
    }
    clients = [Heard(0), Heard(2), Heard(5)]
    FedDistill().query(clients, 1, {"means": means})  # type: ignore[arg-type]
    assert clients[0].got == {"3": [4.0], "4": [9.0]}
    assert clients[1].got == {"3": [1.5], "10": [7.0]}
    assert clients[2].got == {"3": [3.0], "4": [9.0], "10": [7.0]}


def test_pull_is_the_divergence_and_absent_classes_pull_nothing() -> None:
    objective = Follow(0.5, "head", "out", 2)
    assert objective.terms({"out": torch.zeros(1, 2)}, {"out": torch.tensor([0])}, STAMP) == {}
    objective.follow(0, {"1": torch.tensor([log(3.0), 0.0])})
    out = torch.zeros(2, 2, requires_grad=True)
    term = objective.terms({"out": out}, {"out": torch.tensor([1, 0])}, STAMP)["head"]
    # Goal (3/4, 1/4) for the first row alone, prediction (1/2, 1/2): KL = 3/4 log 3/2 + 1/4 log 1/2.
    assert float(term.detach()) == single(0.5 * (0.75 * log(1.5) + 0.25 * log(0.5)) / 2)
    (slope,) = torch.autograd.grad(term, out)
    torch.testing.assert_close(slope, torch.tensor([[-0.0625, 0.0625], [0.0, 0.0]]))


def test_a_round_by_hand() -> None:
    rows = data(2, rows=160)
    run = go("local", FedDistill(weight=2.0), 2, data=rows, batch_size=512)
    bare = [ByHand(run.engine.topology) for _ in rows.clients]
    sent: list[dict[str, Tensor]] = [{}, {}]
    for _ in range(2):
        goals = [sent[1], sent[0]]
        for replica, client in enumerate(rows.clients):
            out = bare[replica](client.train.x)["out"]
            loss = functional.cross_entropy(out, client.train.y)
            pulls = [
                functional.kl_div(
                    functional.log_softmax(out[i], 0), functional.softmax(goals[replica][str(y)], 0), reduction="sum"
                )
                for i, y in enumerate(client.train.y.tolist())
                if str(y) in goals[replica]
            ]
            bare[replica].step(loss + 2.0 * sum(pulls, torch.zeros(())) / len(client.train))
            sent[replica] = class_means(bare[replica](client.train.x)["out"].detach(), client.train.y)
    for replica in range(2):
        bare[replica].assert_as(run, replica)


def test_alone_or_turned_off_it_is_training_alone() -> None:
    off = FedDistill(weight=0.0)
    assert traits(off).turned_off == "feddistill with weight=0 adds nothing to a client's loss"
    assert traits(FedDistill()).turned_off is None
    for clients, method in ((1, FedDistill()), (3, off)):
        alone, run = go("local", None, data=data(clients)), go("local", method, data=data(clients))
        for replica in range(clients):
            assert_same(weights(alone, replica), weights(run, replica))


def test_planned_bytes_are_counted_bytes() -> None:
    run = assert_plan_is_counted("local", FedDistill(), 4, schedule=plan_of("local", clients_per_round=2, drop_out=0.3))
    assert set(run.engine.traffic.by_kind()) == {"soft labels"}


def test_the_server_sees_scores_of_the_classes_held_and_no_weights() -> None:
    rows = data()
    run = go("local", FedDistill(), 1, data=rows, logging=sf.Logging(record=Recording(("fed_server",), every=1)))
    # What the server sent is in its view beside what came.
    seen = {m.sender: m for m in run.engine.view("fed_server").messages if m.sender != "fed_server"}
    for replica, client in enumerate(rows.clients):
        message = seen[f"client{replica}"]
        assert message.kind == "soft labels"
        assert set(message.tensors) == {str(y) for y in client.train.y.tolist()}


def test_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    assert_resumes("local", FedDistill(), tmp_path, schedule=plan_of("local", clients_per_round=2, drop_out=0.2))


def test_clients_may_be_of_any_make() -> None:
    one, other = local(net(1)), local(net(2, (8,)))
    assert len(go("local", FedDistill(), 2, topology=[one, other, one]).history) == 2


@pytest.mark.parametrize("weight", [-1.0, float("nan"), "much"])
def test_weights_out_of_range_are_refused(weight: Any) -> None:
    with pytest.raises(InvalidInput, match="feddistill weight="):
        FedDistill(weight=weight)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="feddistill compares class probabilities; the task here is 'regression'"):
        go("local", FedDistill(), topology=local(net(), task=sf.regression(10)))
