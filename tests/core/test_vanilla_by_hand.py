"""Sequential: whose weights are used when, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.tasks import regression
from splitfed.core.topology import Head, Segment, Topology
from splitfed.engines.base import Placement
from splitfed.engines.local import LocalEngine
from splitfed.models.lenet import lenet
from splitfed.schedules.base import Training
from splitfed.schedules.sequential import Sequential
from splitfed.topologies import vanilla
from tests.examples import InPlaceAfterCut, Scale, SmallUNet, assert_same, engine_of, images
from tests.rounding import single


def two_clients(
    recording: Recording | None = None,
    placement: Placement | None = None,
    replicas: int = 2,
    rows: tuple[int, ...] = (1, 1),
) -> LocalEngine:
    """Prediction v w x with w = 1 at the clients and v = 1 at the server, squared error, SGD at rate .1.

    Client 0 has the row x = 1, client 1 the row x = 2 (`rows` times over); all targets are 0.
    """
    segments = (
        Segment("bottom", "client", Scale(), ("x",), ("z",), "bottom."),
        Segment("top", "server", Scale(), ("z",), ("out",), "top."),
    )
    heads = (Head("out", "server", "client", regression(1)),)
    topology = Topology("scales", segments, {"x": "client"}, heads)
    optims = dict.fromkeys(topology.roles, Optim("SGD", {"lr": 0.1}))
    facts = pass_example(topology, {"x": torch.ones(2, 1)})
    engine = LocalEngine(topology, facts, replicas, optims=optims, recording=recording, placement=placement)
    for replica in range(replicas):
        count = rows[replica % len(rows)]
        engine.own(replica, "train", {"x": torch.full((count, 1), replica + 1.0)}, {"out": torch.zeros(count)})
    return engine


def weight(engine: LocalEngine, party: str) -> float:
    (module,) = engine.parties[party].state.modules.values()
    return float(module.state_dict()["weight"])


def one_round(engine: LocalEngine, hand_over: str, rounds: int = 1) -> tuple[list[float], dict[str, object]]:
    plan = Sequential(hand_over=hand_over)
    state = plan.start(engine.replicas)
    losses: list[float] = []
    for number in range(rounds):
        losses += plan.round(engine, Training(1), number, state).losses
    return losses, state


@pytest.mark.parametrize("hand_over", ["peer", "server"])
def test_one_round_by_hand(hand_over: str) -> None:
    """Client 0: out 1, gradients 2 for both weights, so v = w = .8. Client 1 takes .8 over.

    Then out = .8 x .8 x 2 = 1.28 and the loss is 1.6384; both gradients are 2 x 1.28 x .8 x 2 = 4.096, so both
    weights become .8 - .4096 = .3904. Client 0 still holds .8.
    """
    engine = two_clients()
    losses, state = one_round(engine, hand_over)
    assert losses == single([1.0, 1.6384])
    assert weight(engine, "server") == single(0.3904)
    assert weight(engine, "client1") == single(0.3904)
    assert weight(engine, "client0") == single(0.8)
    assert state == {"newest": 1}


def test_one_round_without_hand_over_by_hand() -> None:
    """Client 1 starts from 1: out = .8 x 1 x 2 = 1.6, loss 2.56, gradients 6.4 for v and 5.12 for w."""
    engine = two_clients()
    losses, _ = one_round(engine, "none")
    assert losses == single([1.0, 2.56])
    assert weight(engine, "server") == single(0.8 - 0.64)
    assert weight(engine, "client1") == single(1 - 0.512)
    assert weight(engine, "client0") == single(0.8)
    assert engine.traffic.bytes(kind="weights") == 0


def test_the_next_round_starts_from_the_last_client() -> None:
    """.3904 twice and x = 1: out = .3904² = .15241216, whose square is the loss."""
    losses, _ = one_round(two_clients(), "peer", rounds=2)
    assert losses[2] == single(0.15241216**2)


def test_peer_and_server_end_in_the_same_bits_but_the_server_sees_weights() -> None:
    states, kinds = [], []
    for hand_over in ("peer", "server"):
        topology = vanilla(seeded_unet(), "down2")
        engine = engine_of(topology, *images(48), replicas=3, recording=Recording(("server",)))
        plan = Sequential(hand_over=hand_over)
        state = plan.start(3)
        for number in range(2):
            plan.round(engine, Training(8), number, state)
        states.append(engine.state()["parties"])
        kinds.append({m.kind for m in engine.view("server").messages})
    assert_same(states[0], states[1])
    assert kinds == [{"activation", "label"}, {"activation", "label", "weights"}]


def seeded_unet() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return SmallUNet()


def test_what_is_handed_over_arrives_exactly_norm_statistics_included() -> None:
    engine = engine_of(vanilla(SmallUNet(), "down2"), *images(32), replicas=2)
    engine.train(0, 0, [torch.arange(16)])
    engine.hand_over(0, 1, "client", 1)
    one, two = (engine.parties[n].state.modules["bottom"].state_dict() for n in ("client0", "client1"))
    assert any("running_mean" in name and bool(t.abs().sum() > 0) for name, t in one.items())
    assert_same(one, two)


def test_one_client_hands_nothing_over() -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(16))
    one_round(engine, "peer", rounds=3)
    assert engine.traffic.bytes(kind="weights") == 0


def test_evaluation_uses_the_newest_segments() -> None:
    """v = .3904 and the newest w = .3904, applied to client 0's row x = 1; its own w is .8."""
    engine = two_clients()
    plan = Sequential()
    state = plan.start(2)
    assert plan.newest(0, state) == 0
    plan.round(engine, Training(1), 0, state)
    assert plan.newest(0, state) == 1
    borrowed = engine.predict(0, "train", "evaluate", borrow=plan.newest(0, state))
    assert float(borrowed.outputs["out"]) == single(0.3904**2)
    assert weight(engine, "client0") == single(0.8)
    assert float(engine.predict(0, "train", "evaluate").outputs["out"]) == single(0.3904 * 0.8)
    assert Sequential(hand_over="none").newest(0, state) == 0


def test_the_order_of_rows_depends_on_seed_epoch_and_client() -> None:
    seen = []

    class Spy(LocalEngine):
        def train(self, replica: int, epoch: int, batches: object, first: int = 0) -> list[float]:
            seen.append((replica, epoch, torch.cat(list(batches)).tolist()))  # type: ignore[call-overload]
            return [0.0]

    engine = engine_of(vanilla(lenet((1, 8, 8), 10), "pool1"), *images(32), replicas=2)
    engine.__class__ = Spy
    plan = Sequential(hand_over="none")
    for seed in (0, 1):
        plan.round(engine, Training(8, local_epochs=2, seed=seed), 1, plan.start(2))
    assert [(replica, epoch) for replica, epoch, _ in seen] == [(0, 2), (0, 3), (1, 2), (1, 3)] * 2
    assert all(sorted(rows) == list(range(16)) for *_, rows in seen)
    assert len({tuple(rows) for *_, rows in seen}) == 8


def test_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown hand_over 'per'; did you mean 'peer'"):
        Sequential(hand_over="per")
    segments = (Segment("all", "client", nn.Linear(1, 1), ("x",), ("out",)),)
    alone = Topology("alone", segments, {"x": "client"}, (Head("out", "client", "client"),))
    with pytest.raises(InvalidInput, match="hand_over='server' needs a party without data; topology 'alone' has none"):
        Sequential(hand_over="server").check(alone, 2)
    with pytest.raises(InvalidInput, match="batch_size=0 is not allowed"):
        Training(batch_size=0)
    with pytest.raises(InvalidInput, match="local_epochs=0 is not allowed"):
        Training(local_epochs=0)
