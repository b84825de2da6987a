"""SCAFFOLD: two rounds by hand, variates from momentum and from gradients, a first round that is FedAvg's."""

from __future__ import annotations

import pytest
import torch

from splitfed.core.optimizers import Optim
from splitfed.defenses import GaussianRelease
from splitfed.federated import FedAvg, Scaffold
from splitfed.federated.scaffold import Steer
from splitfed.models import mlp
from splitfed.schedules import Independent
from splitfed.topologies import vanilla
from splitfed.training.entry_point import train
from splitfed.training.run import Run
from tests.federated.examples import CLIENTS, RATE, START, common, go, hand, own, pictures
from tests.rounding import single


def variate(run: Run, replica: int) -> float:
    objective = run.engine.party(replica, "client").state.objective
    assert isinstance(objective, Steer)
    return float(objective.own["model/weight"])


def test_two_rounds_by_hand() -> None:
    first, second = hand("scaffold"), hand("scaffold", rounds=2)
    # After FedAvg's first round, (x - y) / (K r): .488 / .3 and 1 / .1.
    assert [variate(first, 0), variate(first, 1)] == pytest.approx([0.488 / 0.3, 10.0], rel=1e-5)
    assert float(first.method_state["variate"]["model/weight"]) == pytest.approx(0.75 * 0.488 / 0.3 + 2.5, rel=1e-5)
    c, x, ends, held = 0.75 * 0.488 / 0.3 + 2.5, 1.384, [], []
    for (rows, label), ci in zip(CLIENTS, (0.488 / 0.3, 10.0), strict=True):
        w = x
        for _ in range(rows):
            w -= RATE * (2 * (w - label) + c - ci)
        ends.append(w)
        held.append(ci - c + (x - w) / (rows * RATE))
    assert [own(second, 0), own(second, 1)] == pytest.approx(ends, rel=1e-5)
    assert [variate(second, 0), variate(second, 1)] == pytest.approx(held, rel=1e-4)
    assert common(second) == pytest.approx(0.75 * ends[0] + 0.25 * ends[1], rel=1e-5)


def test_the_first_round_is_fedavgs_and_later_ones_are_not() -> None:
    one, other = (go(method, 1).method_state["weights"] for method in (Scaffold(), FedAvg()))
    assert all(torch.equal(one[name], other[name]) for name in other)
    later = [go(method, 2).method_state["weights"]["head/fc2.bias"] for method in (Scaffold(), FedAvg())]
    assert not torch.allclose(*later)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}], ids=str)
def test_a_variate_is_as_long_as_a_gradient_whatever_the_momentum(options: dict[str, float]) -> None:
    """A constant gradient of 2 tells itself: at rate zero in the limit, w hardly moves."""
    tiny = Optim("SGD", {"lr": 1e-4, **options})
    run = hand("scaffold", optimizer=tiny)
    assert variate(run, 0) == pytest.approx(2.0, rel=2e-2)
    assert variate(run, 1) == pytest.approx(10.0, rel=2e-2)


def test_variates_of_gradients_are_those_of_changes_for_plain_sgd_and_serve_adam() -> None:
    by_change, by_gradient = (hand(Scaffold(variates=v), rounds=3) for v in ("change", "gradient"))
    assert variate(by_change, 0) == pytest.approx(variate(by_gradient, 0), rel=1e-4)
    assert common(by_change) == pytest.approx(common(by_gradient), rel=1e-5)
    adam = hand(Scaffold(variates="gradient"), optimizer=Optim("Adam", {"lr": 0.01}))
    assert variate(adam, 1) == pytest.approx(10.0, rel=1e-5)


def test_the_server_takes_steps_of_its_own_length() -> None:
    half = hand(Scaffold(server_rate=0.5))
    assert common(half) == single(START + 0.5 * (1.384 - START))


def test_the_servers_variate_moves_by_the_share_that_took_part() -> None:
    run = hand("scaffold", schedule=Independent(clients_per_round=1))
    replica = next(replica for replica in range(2) if own(run, replica) != START)
    assert float(run.method_state["variate"]["model/weight"]) == single(0.5 * variate(run, replica))


def test_it_brings_clients_together_where_fedavg_stays_apart() -> None:
    """With one row each the optimum is -1; three steps a round lead FedAvg astray, where curvatures differ."""
    wide = ((3, 1.0), (1, -3.0))
    ends = [common(hand(method, rounds=60, clients=wide)) for method in (FedAvg(), Scaffold())]
    # Weighted by rows the optimum of the summed loss is (3 * 1 - 3) / 4 = 0.
    assert abs(ends[1]) < 1e-3 < abs(ends[0])


def test_clients_whose_segments_a_release_has_frozen_have_no_variates() -> None:
    private = GaussianRelease(noise_multiplier=4.0, freeze=True)
    split = vanilla(mlp((1, 8, 8), 10, hidden=[4], seed=0), "relu1")
    run = train(split, pictures(), method="scaffold", schedule="splitfed_v3", defenses=private, rounds=2)
    assert run.method_state["variate"] == {}
    assert set(run.method_state["weights"]) == {"bottom/fc1.weight", "bottom/fc1.bias"}
