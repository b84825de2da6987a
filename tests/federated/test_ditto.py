"""Ditto: both models by hand; no pull is training alone; the averaged model is FedAvg's."""

from __future__ import annotations

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.federated import Ditto
from tests.examples import assert_same
from tests.federated.examples import common, go, hand, own, weights
from tests.rounding import single


def test_two_rounds_by_hand() -> None:
    run = hand(Ditto(weight=0.5), rounds=2)
    averaged = [2.0, 1.384]
    v = 2.0
    for start in averaged:
        for _ in range(3):
            v -= 0.1 * (2 * (v - 1) + 0.5 * (v - start))
    assert own(run, 0) == single(v)
    assert common(hand(Ditto(weight=0.5)), "shared_model/weight") == single(1.384)
    # The client predicts with its own model; the score of the other one is beside it.
    assert float(run.predict(torch.ones(1, 1), client=0)) == single(v)
    assert set(run.history[-1]["test"]["method"]) == {"global"}


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_the_averaged_model_is_fedavgs_and_without_a_pull_the_own_one_is_alone(weight: float) -> None:
    run, averaged, alone = go(Ditto(weight=weight), 3), go("fedavg", 3), go("standalone", 3)
    found = run.method_state["weights"]
    assert_same({name.removeprefix("shared_"): t for name, t in found.items()}, averaged.method_state["weights"])
    for replica in range(3):
        mine = {name: t for name, t in weights(run, replica).items() if not name.startswith("shared_")}
        assert all(torch.equal(t, mine[name]) for name, t in weights(alone, replica).items()) == (weight == 0)
    scores = run.history[-1]["test"]
    assert scores["method"]["global"] == averaged.history[-1]["test"]["clients"]
    assert run.bytes == averaged.bytes
    if weight == 0:
        assert scores["clients"] == alone.history[-1]["test"]["clients"]
        assert run.accuracy == alone.accuracy


def test_a_segment_that_bears_the_name_of_the_second_model_is_refused() -> None:
    topology = go(Ditto(), 1).engine.topology
    with pytest.raises(
        InvalidInput, match=r"ditto names the segments of its second model shared_\.\.\.; rename segment 'shared_body'"
    ):
        go(Ditto(), 1, topology=topology)
