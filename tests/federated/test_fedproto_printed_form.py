"""FedProto as printed: class means against prototypes, answers by the nearest one, means of similar clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.optimizers import Optim
from splitfed.federated.fedproto import FedProto, Pull, nearest
from splitfed.federated.nearest_prototype import NAME, NearestPrototype
from splitfed.schedules import Sequential, SplitFedV1
from splitfed.schedules.base import Training
from tests.federated.methods import (
    BUILDERS,
    ByHand,
    assert_nothing_held_twice,
    assert_plan_is_counted,
    assert_resumes,
    built,
    data,
    go,
)

ALONE = Sequential(hand_over="none")
RATE = 0.05
NEAREST = FedProto(answer="nearest")


def means(z: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {int(c): z[y == c].mean(0) for c in y.unique()}


def test_class_means_of_a_batch_by_hand() -> None:
    # Class 0: rows (4, 5) and (2, 1), mean (3, 3), 5 from (0, -1); class 2: (0, 5), 2 from (0, 3); 1 has no prototype.
    objective = Pull(FedProto(weight=0.5, distance="class_means"), "body", "z", "out")
    objective.prototypes = {"0": torch.tensor([0.0, -1.0]), "2": torch.tensor([0.0, 3.0])}
    z = torch.tensor([[4.0, 5.0], [0.0, 5.0], [9.0, 9.0], [2.0, 1.0]], requires_grad=True)
    term = objective.terms({"z": z}, {"out": torch.tensor([0, 2, 1, 0])}, Stamp("train", 0, 0, 0))["body"]
    (slope,) = torch.autograd.grad(term, z)
    assert float(term.detach()) == pytest.approx(0.5 * (5 + 2), rel=1e-5)
    # The slope of a norm is the unit vector, (3, 4) / 5, of which each of two rows has half.
    torch.testing.assert_close(slope[0], 0.5 * torch.tensor([0.6, 0.8]) / 2)
    torch.testing.assert_close(slope[0], slope[3])
    assert slope[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", ["local", "vanilla"])
def test_rounds_beside_a_bare_loop(shape: str) -> None:
    """Equations 3, 6 (weights n_ij / N_j), 7 and 8, client after client, in plain PyTorch."""
    rows, topology, rounds = data(), built(shape), 3
    method, optimizer = FedProto(weight=0.3, distance="class_means"), Optim("SGD", {"lr": RATE, "momentum": 0.9})
    run = go(shape, method, rounds, data=rows, topology=topology, schedule=ALONE, optimizer=optimizer)
    value, training = topology.segments[0].outputs[0], Training(16)
    output = topology.heads[0].value
    # In a split form all clients train one server segment.
    bare = [ByHand(topology, RATE) for _ in rows.clients]
    for one in bare[1:] if shape == "vanilla" else ():
        shared = topology.segments[-1].name
        one.modules[shared] = bare[0].modules[shared]
    servers = torch.optim.SGD(bare[0].modules[topology.segments[-1].name].parameters(), lr=RATE, momentum=0.9)
    if shape == "vanilla":
        for one in bare:
            one.optimizer = torch.optim.SGD(one.modules[topology.segments[0].name].parameters(), lr=RATE, momentum=0.9)
    known: dict[int, Tensor] = {}
    for number in range(rounds):
        for replica, client in enumerate(rows.clients):
            for batch in training.batches(len(client.train), number, replica):
                made, y = bare[replica](client.train.x[batch]), client.train.y[batch]
                own = means(made[value].flatten(1), y)
                pulls = [torch.linalg.vector_norm(own[c] - known[c]) for c in own if c in known]
                loss = functional.cross_entropy(made[output], y) + 0.3 * sum(pulls, torch.zeros(()))
                servers.zero_grad()
                bare[replica].step(loss)
                if shape == "vanilla":
                    servers.step()
        sums: dict[int, Tensor] = {}
        counts: dict[int, int] = {}
        for replica, client in enumerate(rows.clients):
            z, y = bare[replica](client.train.x)[value].detach().flatten(1), client.train.y
            for c, mean in means(z, y).items():
                n = int((y == c).sum())
                sums[c], counts[c] = sums.get(c, torch.zeros(())) + n * mean, counts.get(c, 0) + n
        known |= {c: sums[c] / counts[c] for c in sums}
    for replica in range(len(rows.clients)):
        bare[replica].assert_as(run, replica)
    for c, row in known.items():
        torch.testing.assert_close(run.method_state["prototypes"][str(c)], row, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", BUILDERS)
def test_the_nearest_prototype_answers(shape: str) -> None:
    """What the run predicts is the argmin over the prototypes that the client was sent last, on every split."""
    rows = data()
    run = go(shape, NEAREST, 4, data=rows, schedule=ALONE, optimizer=Optim("Adam", {"lr": 0.003}))
    earlier = go(shape, NEAREST, 3, data=rows, schedule=ALONE, optimizer=Optim("Adam", {"lr": 0.003}))
    prototypes = earlier.method_state["prototypes"]
    for replica, client in enumerate(rows.clients):
        modules = run.engine.modules(replica)
        first = built(shape).segments[0].name
        with torch.no_grad():
            z = modules[first].eval()(client.test.x)
        expected = nearest(z, prototypes)
        scores = run.predict(client.test.x, client=replica)
        assert torch.equal(scores.argmax(1), expected)
        accuracy = float((expected == client.test.y).double().mean())
        assert run.history[-1]["test"]["clients"][replica] == pytest.approx(accuracy)
    assert run.history[-1]["test"]["union"] > 0.4
    # Training is that of the default: what answers teaches nothing.
    plain = go(shape, FedProto(), 4, data=rows, schedule=ALONE, optimizer=Optim("Adam", {"lr": 0.003}))
    assert run.history[-1]["loss"] == plain.history[-1]["loss"]
    for name, module in plain.engine.modules(0).items():
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor, run.engine.modules(0)[name].state_dict()[key])


def test_scores_of_classes_without_a_prototype_are_the_lowest() -> None:
    module = NearestPrototype(3, 2, 3)
    assert module(torch.ones(2, 2)).tolist() == [[0.0] * 3] * 2
    module.prototypes[1], module.known[1] = torch.tensor([1.0, 4.0]), True
    module.known[0] = True
    found = module(torch.tensor([[1.0, 1.0]]))
    assert found[0, 1] == -3
    assert found[0].argmin() == 2
    binary = NearestPrototype(2, 1, 1)
    binary.prototypes[:, 0], binary.known[:] = torch.tensor([0.0, 4.0]), True
    assert binary(torch.tensor([[3.0], [1.0]])).tolist() == [[2.0], [-2.0]]


def test_means_of_similar_clients_by_hand() -> None:
    method = FedProto(similar=0.5)
    uploads = {
        "0": {"4": torch.tensor([1.0, 0.0]), "4/rows": torch.tensor(2)},
        "1": {"4": torch.tensor([0.0, 3.0]), "4/rows": torch.tensor(4)},
        "2": {"4": torch.tensor([2.0, 0.0]), "4/rows": torch.tensor(2), "5": torch.ones(2), "5/rows": torch.tensor(9)},
    }
    state: dict[str, Any] = {"prototypes": {"4": torch.zeros(2), "5": torch.ones(2)}, "uploads": uploads}
    sent = method._prototypes_for(0, state)
    # cos is 1, 0 and 1: weights 2 e^2, 4, 2 e^2.
    e2 = float(torch.tensor(2.0).exp())
    total = 4 * e2 + 4
    torch.testing.assert_close(sent["4"], torch.tensor([(2 * e2 + 2 * 2 * e2) / total, 4 * 3 / total]))
    # A class that the client does not hold is the global mean.
    assert torch.equal(sent["5"], torch.ones(2))
    # Nor has who sent nothing any similar client.
    assert method._prototypes_for(7, state)["4"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", [NEAREST, FedProto(similar=0.2, weighted=False)], ids=["nearest", "similar"])
@pytest.mark.parametrize("shape", ["local", "vanilla"])
def test_plans_are_counted_and_runs_resumed_to_the_bit(method: FedProto, shape: str, tmp_path: Path) -> None:
    assert_nothing_held_twice(assert_plan_is_counted(shape, method, schedule=ALONE))
    assert_resumes(shape, method, tmp_path, schedule=ALONE)


def test_averaged_segments_leave_the_prototypes_of_a_client_where_they_are() -> None:
    run = go("vanilla", NEAREST, 3, schedule=SplitFedV1())
    buffers = [run.engine.modules(replica)[NAME].state_dict() for replica in range(3)]
    assert all(bool(one["known"].all()) for one in buffers)
    assert run.history[-1]["averaged"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"similar": 0.0}, "fedproto similar=0"),
        ({"similar": 1.0, "secure": True}, "fedproto similar=1 compares every client's prototypes"),
        ({"answer": "argmin"}, "unknown fedproto answer 'argmin'"),
    ],
)
def test_parameters_out_of_range_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        FedProto(**arguments)


def test_a_segment_of_the_same_name_is_refused() -> None:
    topology = built("local")
    first, *others = topology.segments
    taken = replace(topology, segments=(replace(first, name=NAME), *others))
    with pytest.raises(InvalidInput, match=f"fedproto calls the segment of its predictions '{NAME}'"):
        sf.train(taken, data(), method=NEAREST, schedule=ALONE, rounds=1)
