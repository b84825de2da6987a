"""FedProx: the pull towards what was sent, worked out by hand; none is FedAvg to the bit."""

from __future__ import annotations

from splitfed.federated import FedProx
from tests.examples import assert_same
from tests.federated.examples import common, go, hand, own, weights
from tests.rounding import single


def test_a_round_by_hand() -> None:
    run = hand(FedProx(mu=1.0))
    # Gradients 2 (w - 1) + (w - 2): 2 at 2; 1.6 - .2 at 1.8; 1.32 - .34 at 1.66. The other client takes one step.
    assert own(run, 0) == single(2 - 0.1 * (2 + 1.4 + 0.98))
    assert own(run, 1) == single(1.0)
    assert common(run) == single(0.75 * 1.562 + 0.25)


def test_the_pull_is_to_what_the_round_began_with() -> None:
    run = hand(FedProx(mu=1.0), rounds=2)
    w = start = 0.75 * 1.562 + 0.25
    for _ in range(3):
        w -= 0.1 * (2 * (w - 1) + (w - start))
    assert own(run, 0) == single(w)


def test_no_pull_is_fedavg_to_the_bit() -> None:
    one, other = go(FedProx(mu=0.0), 2), go("fedavg", 2)
    assert_same(one.method_state["weights"], other.method_state["weights"])
    for replica in range(3):
        assert_same(weights(one, replica), weights(other, replica))
    assert common(hand(FedProx(mu=1.0))) != common(hand("fedavg"))
