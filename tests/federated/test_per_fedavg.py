"""Per-FedAvg: the step there and back by hand, pairs of batches, and whose weights predict."""

from __future__ import annotations

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.federated import PerFedAvg
from splitfed.federated.per_fedavg import Ahead
from splitfed.topologies import vanilla
from tests.examples import assert_same
from tests.federated.examples import common, go, hand, model, own, pictures, weights
from tests.rounding import single


def by_hand(w: float, steps: int, label: float, rate: float = 0.05) -> float:
    """All batches of a client have the same gradient here, so that only their number counts."""
    for _ in range(steps):
        ahead = w - rate * 2 * (w - label)
        w -= 0.1 * 2 * (ahead - label)
    return w


def test_a_round_by_hand() -> None:
    run = hand(PerFedAvg(rate=0.05))
    # Three batches are two pairs: (0, 1) and (1, 2); one batch is a pair with itself.
    ends = [by_hand(2.0, 2, 1.0), by_hand(2.0, 1, -3.0)]
    assert ends[1] == single(2 - 0.1 * 2 * (1.5 + 3))
    assert [own(run, 0), own(run, 1)] == single(ends)
    mean = 0.75 * ends[0] + 0.25 * ends[1]
    assert common(run) == single(mean)
    assert run.history[0]["steps"] == 6
    # A client predicts with the mean after one step of its own.
    assert float(run.predict(torch.ones(1, 1), client=1)) == single(mean - 0.05 * 2 * (mean + 3))
    assert set(run.history[0]["test"]["method"]) == {"global"}


def test_every_batch_has_its_turn_and_a_partner() -> None:
    class Listens:
        """Takes down what it is told to train on."""

        replica, rate, objectives = 0, 0.1, {"client": Ahead(())}

        def train(self, epoch: int, batches: list[torch.Tensor], first: int) -> list[float]:
            self.heard = [int(rows) for rows in batches], first
            return []

    for given, expected in (((1,), [1, 1]), ((1, 2), [1, 2]), ((1, 2, 3), [1, 2, 2, 3]), ((), [])):
        learner = Listens()
        PerFedAvg().train(learner, 0, [torch.tensor(n) for n in given], 4)  # type: ignore[arg-type]
        assert learner.heard == (expected, 8)


def test_rate_zero_is_fedavg_on_second_batches() -> None:
    run = hand(PerFedAvg(rate=0.0), clients=((4, 1.0), (2, -3.0)))
    assert [own(run, 0), own(run, 1)] == single([1 + 0.8**2, -3 + 0.8 * 5])


def test_looking_for_personal_weights_leaves_no_trace() -> None:
    run = go(PerFedAvg(rate=0.1), 1)
    before = [{name: t.clone() for name, t in weights(run, replica).items()} for replica in range(3)]
    average = {name: t.clone() for name, t in run.method_state["weights"].items()}
    served = [run.method.newest(learner, run.method_state) for learner in run.learners]
    assert_same(before, [weights(run, replica) for replica in range(3)])
    assert_same(average, run.method_state["weights"])
    assert not torch.equal(served[0]["head/fc2.weight"], served[1]["head/fc2.weight"])
    # One plain step on the mean loss of all the client's training rows, in training mode.
    rows = pictures().clients[0].train
    modules = run.engine.modules(0, average)
    loss = torch.nn.functional.cross_entropy(modules["head"](modules["body"].train()(rows.x)), rows.y)
    (slope,) = torch.autograd.grad(loss, [modules["head"].fc2.weight])
    assert torch.allclose(served[0]["head/fc2.weight"], average["head/fc2.weight"] - 0.1 * slope, atol=1e-6)


def test_split_models_are_refused_in_a_sentence_that_says_what_to_take() -> None:
    with pytest.raises(
        InvalidInput, match=r"would cross between the parties of topology 'vanilla' once more, .* ditto"
    ):
        go(PerFedAvg(), topology=vanilla(model(), "relu"), schedule="splitfed_v3")


def test_its_inner_rate_is_the_clients_as_that_stands() -> None:
    # The tests' rate is .1; a scheduler halves it after the round, and the client's own step is taken at what it is.
    run = hand("per_fedavg")
    ends = [by_hand(2.0, 2, 1.0, rate=0.1), by_hand(2.0, 1, -3.0, rate=0.1)]
    assert [own(run, 0), own(run, 1)] == single(ends)
    mean = 0.75 * ends[0] + 0.25 * ends[1]
    assert float(run.predict(torch.ones(1, 1), client=1)) == single(mean - 0.1 * 2 * (mean + 3))
    falling = Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 1, "gamma": 0.5})
    run = hand("per_fedavg", optimizer=falling)
    assert float(run.predict(torch.ones(1, 1), client=1)) == single(mean - 0.05 * 2 * (mean + 3))
