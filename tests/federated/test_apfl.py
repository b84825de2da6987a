"""APFL: mixture, its gradient and alpha by hand; alpha of one is training alone, of zero FedAvg."""

from __future__ import annotations

import pytest
import torch

from splitfed.federated import Apfl
from splitfed.training.run import Run
from tests.federated.examples import go, hand, weights


def held(run: Run, replica: int) -> tuple[float, float, float]:
    """A client's own weight, alpha, and its copy of the averaged weight."""
    state = {f"{n}/{k}": t for n, m in run.engine.modules(replica).items() for k, t in m.state_dict().items()}
    return tuple(float(state[name]) for name in ("model/own.weight", "model/alpha", "shared_model/weight"))  # type: ignore[return-value]


def by_hand(rounds: int, learns: str) -> tuple[float, float, float]:
    """Client 0 of the world of `tests.federated.examples`: three steps a round towards 1, w sent anew at its start."""
    v, w, alpha = 2.0, 2.0, 0.5
    for number in range(rounds):
        w = 2.0 if number == 0 else 1.384
        for step in range(3):
            slope = 2 * (alpha * v + (1 - alpha) * w - 1)
            next_v, next_w = v - 0.1 * alpha * slope, w - 0.1 * 2 * (w - 1)
            if learns == "step" or (learns == "round" and step == 0):
                alpha = min(max(alpha - 0.1 * slope * (v - w), 0.0), 1.0)
            v, w = next_v, next_w
    return v, alpha, w


@pytest.mark.parametrize("learns", ["round", "step", "never"])
def test_two_rounds_by_hand(learns: str) -> None:
    run = hand(Apfl(learns=learns), rounds=2)
    expected = by_hand(2, learns)
    assert held(run, 0) == pytest.approx(expected, rel=1e-5)
    assert (expected[1] != 0.5) == (learns != "never")
    # The prediction mixes the client's own weight with the newest average.
    average = float(run.method_state["weights"]["shared_model/weight"])
    mixed = expected[1] * expected[0] + (1 - expected[1]) * average
    assert float(run.predict(torch.ones(1, 1), client=0)) == pytest.approx(mixed, rel=1e-5)


def test_alpha_stays_between_zero_and_one() -> None:
    run = hand(Apfl(learns="step", rate=1e4), rounds=3)
    assert held(run, 0)[1] in (0.0, 1.0)


def test_alpha_of_one_that_never_learns_is_training_alone() -> None:
    run, alone = go(Apfl(alpha=1.0, learns="never"), 2), go("standalone", 2)
    for replica in range(3):
        mine = weights(run, replica)
        for name, tensor in weights(alone, replica).items():
            assert torch.equal(mine[name.replace("/", "/own.")], tensor), name
    assert run.history[-1]["test"]["clients"] == alone.history[-1]["test"]["clients"]


def test_alpha_of_zero_that_never_learns_predicts_as_fedavg() -> None:
    run, averaged = go(Apfl(alpha=0.0, learns="never", buffers=False), 2), go("fedavg", 2)
    for name, tensor in run.method_state["weights"].items():
        assert torch.equal(tensor, averaged.method_state["weights"][name.removeprefix("shared_")])
    own = weights(run, 0)["body/own.fc1.weight"]
    assert torch.equal(own, go("fedavg", 1).engine.topology.segment("body").module.state_dict()["fc1.weight"])
