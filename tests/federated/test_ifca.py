"""IFCA: the choice by loss, the fusion by cluster, one cluster, and groups that are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.federated import Ifca
from splitfed.federated.ifca import best_cluster
from splitfed.topologies import local
from tests.examples import assert_same
from tests.federated.examples import go, hand, own, weights

GROUPS = ((2, 1.0), (1, -3.0), (1, 1.0), (3, -3.0))


def test_a_client_takes_the_model_of_lowest_loss() -> None:
    run = hand(Ifca(clusters=2), clients=GROUPS)
    models = [{"model/weight": torch.tensor([[w]])} for w in (0.5, -2.0)]
    assert [best_cluster(learner, models) for learner in run.learners] == [0, 1, 0, 1]
    assert best_cluster(run.learners[0], [models[0], models[0]]) == 0


def test_a_round_by_hand() -> None:
    run = hand(Ifca(clusters=2), rounds=1, clients=GROUPS)
    second = float(Ifca(clusters=2)._draw_weights(run.engine.topology, 1, run.seed)["model/weight"])
    assert -1 <= second <= 1, "as torch draws it; 2 suits nobody better"
    # All take the second model: two and one steps towards 1, one and three towards -3; shares 2, 1, 1, 3 of 7.
    ends = [label + 0.8**rows * (second - label) for rows, label in GROUPS]
    assert [own(run, replica) for replica in range(4)] == pytest.approx(ends, rel=1e-5)
    first, averaged = (float(found["model/weight"]) for found in run.method_state["clusters"])
    assert first == 2.0, "chosen by nobody, it stays"
    assert averaged == pytest.approx(sum(rows * w for (rows, _), w in zip(GROUPS, ends, strict=True)) / 7, rel=1e-5)
    assert run.method_state["chosen"] == {"0": 1, "1": 1, "2": 1, "3": 1}


def test_groups_are_found_and_each_has_its_model() -> None:
    run = hand(Ifca(clusters=2), rounds=30, clients=GROUPS)
    chosen = run.method_state["chosen"]
    assert chosen["0"] == chosen["2"] != chosen["1"] == chosen["3"]
    found = [float(run.predict(torch.ones(1, 1), client=replica)) for replica in range(4)]
    assert found == pytest.approx([1.0, -3.0, 1.0, -3.0], abs=1e-3)
    assert sorted(float(m["model/weight"]) for m in run.method_state["clusters"]) == pytest.approx([-3, 1], abs=1e-3)


def test_one_cluster_is_fedavg_to_the_bit() -> None:
    one, other = go(Ifca(clusters=1), 2), go("fedavg", 2)
    assert_same(one.method_state["clusters"][0], other.method_state["weights"])
    for replica in range(3):
        assert_same(weights(one, replica), weights(other, replica))
    assert one.engine.traffic.bytes(kind="weights") == other.engine.traffic.bytes(kind="weights")


def test_models_differ_from_the_start_and_by_seed() -> None:
    runs = [go(Ifca(), 1, seed=seed, optimizer=Optim("SGD", {"lr": 1e-9})) for seed in (0, 1)]
    for cluster, same in ((0, True), (1, False)):
        one, other = (run.method_state["clusters"][cluster]["head/fc2.weight"] for run in runs)
        assert torch.allclose(one, other, atol=1e-6) == same
    topology = runs[0].engine.topology
    which = ((0, 0), (0, 1), (0, 2), (1, 1))
    firsts = [Ifca(clusters=3)._draw_weights(topology, cluster, seed)["head/fc2.weight"] for seed, cluster in which]
    assert all(not torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])


def test_a_model_that_cannot_be_drawn_anew_is_refused() -> None:
    class Odd(nn.Module):
        """A weight of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) @ self.scale

    with pytest.raises(InvalidInput, match="ifca cannot draw the weights of Odd"):
        go("ifca", 1, topology=local(Odd()))
