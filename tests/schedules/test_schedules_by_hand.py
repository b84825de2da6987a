"""Who trains whose weights when, with one weight on each side of the cut, worked out by hand.

Prediction v w x with w = 1 at the clients and v = 1 at the server, squared error against 0, SGD at rate .1. Client 0
has the row x = 1, client 1 the row x = 2. The gradients are 2 v w² x² for v and 2 v² w x² for w.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Topology
from splitfed.engines.base import FED
from splitfed.engines.local import LocalEngine
from splitfed.schedules.alternate import Alternate
from splitfed.schedules.base import Round, Schedule, Training
from splitfed.schedules.blind import Blind
from splitfed.schedules.sglr import Sglr
from splitfed.schedules.splitfed_v1 import SplitFedV1
from splitfed.schedules.splitfed_v2 import SplitFedV2
from splitfed.schedules.splitfed_v3 import SplitFedV3
from tests.core.test_vanilla_by_hand import two_clients, weight
from tests.examples import import_from_contributing
from tests.rounding import single

STEP0 = 1 - 0.1 * 2  # from 1, client 0: gradients 2 and 2
STEP1 = 1 - 0.1 * 8  # from 1, client 1: gradients 8 and 8


def placed(plan: Schedule, replicas: int = 2) -> LocalEngine:
    first = two_clients(replicas=replicas)
    return two_clients(replicas=replicas, placement=plan.placement(first.topology))


def one_round(engine: LocalEngine, plan: Schedule, training: Training | None = None, number: int = 0) -> Round:
    return plan.round(engine, training or Training(1), number, plan.start(engine.replicas))


def test_splitfed_v1() -> None:
    """Both clients start from 1; the averages of .8 and .2 are .5 on both sides."""
    plan = SplitFedV1()
    engine = placed(plan)
    done = one_round(engine, plan)
    assert done.losses == [1.0, 4.0]
    assert weight(engine, "server") == single((STEP0 + STEP1) / 2)
    assert weight(engine, FED) == single((STEP0 + STEP1) / 2)
    assert (weight(engine, "client0"), weight(engine, "client1")) == single((STEP0, STEP1))
    # A client's weight goes down and up: 4 messages of 4 bytes.
    assert engine.traffic.bytes(kind="weights") == 16
    # With the averages: .5 x .5 x 2 = .5 for client 1.
    found = engine.predict(1, "train", "evaluate", borrow=plan.newest(1, {}))
    assert float(found.outputs["out"]) == single(0.5)


def test_splitfed_v2() -> None:
    """One server weight through both clients; seed 0 draws client 1 first in round 0 and client 0 in another."""
    first = {}
    for number in range(6):
        plan = SplitFedV2()
        engine = placed(plan)
        losses = one_round(engine, plan, number=number).losses
        first[losses[0]] = losses
        if losses[0] == 1.0:
            # Client 1 meets v = .8 with a fresh w = 1: out 1.6, gradients 2 x .8 x 4 = 6.4 and 2 x .64 x 4 = 5.12.
            assert losses[1] == single(2.56)
            assert weight(engine, "server") == single(0.8 - 0.64)
            assert weight(engine, FED) == single((0.8 + 1 - 0.512) / 2)
        else:
            # Client 0 meets v = .2: out .2, gradients 2 x .2 = .4 and 2 x .04 = .08.
            assert losses == single([4.0, 0.04])
            assert weight(engine, "server") == single(0.2 - 0.04)
            assert weight(engine, FED) == single((0.2 + 1 - 0.008) / 2)
    assert len(first) == 2, "both orders occur"


def test_splitfed_v3() -> None:
    """Server copies .8 and .2 meet at .5 after every epoch; clients keep theirs, and nothing is sent between them."""
    plan = SplitFedV3()
    engine = placed(plan)
    one_round(engine, plan, Training(1, local_epochs=2))
    # Second epoch, v = .5. Client 0, w = .8: gradients 2 x .5 x .64 = .64, 2 x .25 x .8 = .4.
    # Client 1, w = .2: gradients 2 x .5 x .04 x 4 = .16, 2 x .25 x .2 x 4 = .4.
    assert weight(engine, "client0") == single(0.8 - 0.04)
    assert weight(engine, "client1") == single(0.2 - 0.04)
    assert weight(engine, "server") == single((0.5 - 0.064 + 0.5 - 0.016) / 2)
    assert engine.traffic.bytes(kind="weights") == 0


def test_alternate_hands_over_after_every_batch() -> None:
    """Two local epochs of one batch each: client 0, 1, 0, 1, every one from the weights of the one before."""
    engine = placed(Alternate())
    done = one_round(engine, Alternate(), Training(1, local_epochs=2))
    v = w = 1.0
    expected = []
    for x in (1.0, 2.0, 1.0, 2.0):
        expected.append((v * w * x) ** 2)
        v, w = v - 0.1 * 2 * v * w * w * x * x, w - 0.1 * 2 * v * v * w * x * x
    assert done.losses == single(expected)
    assert weight(engine, "server") == single(v)
    assert weight(engine, "client1") == single(w)
    assert engine.traffic.bytes(kind="weights") == 3 * 4


def test_the_schedule_of_the_contributing_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1 with three rows comes first, from 1; client 0 goes on from its .2 and .2."""
    plan = import_from_contributing("largest_first", tmp_path, monkeypatch).LargestFirst()
    engine, state = two_clients(rows=(1, 3)), plan.start(2)
    done = plan.round(engine, Training(8), 0, state)
    assert (done.losses, done.clients) == (single([4.0, (0.2 * 0.2) ** 2]), (1, 0))
    assert weight(engine, "server") == weight(engine, "client0") == single(0.2 - 0.1 * 2 * 0.2**3)
    assert weight(engine, "client1") == single(0.2)
    assert (state, plan.newest(1, state)) == ({"newest": 0}, 0)
    assert engine.traffic.bytes(kind="weights") == 4


def test_blind_averages_the_losses() -> None:
    """v moves by the mean gradient (2 + 8) / 2 = 5, each client by half its own: 1 and 4."""
    engine = placed(Blind())
    done = one_round(engine, Blind())
    assert done.losses == [1.0, 4.0]
    assert weight(engine, "server") == single(0.5)
    assert (weight(engine, "client0"), weight(engine, "client1")) == single((0.9, 0.6))


@pytest.mark.parametrize(("combine", "total"), [("sum", 3.0), ("mean", 1.5)])
def test_sglr_combines_the_gradients_at_the_cut(combine: str, total: float) -> None:
    """One loss, the mean over both rows: the gradients at z = 1 and z = 2 are z each, so 1 and 2, and 3 in all.

    Each client multiplies the common one by its own x.
    """
    plan = Sglr(phi=1.0, combine=combine)
    engine = placed(plan)
    one_round(engine, plan)
    assert (weight(engine, "client0"), weight(engine, "client1")) == single((1 - 0.1 * total, 1 - 0.2 * total))
    assert weight(engine, "server") == single(0.5)


def test_sglr_without_a_common_gradient_is_blind() -> None:
    engine, other = placed(Sglr(phi=0.0)), placed(Blind())
    one_round(engine, Sglr(phi=0.0))
    one_round(other, Blind())
    for party in ("client0", "client1", "server"):
        assert weight(engine, party) == weight(other, party)


def test_averages_are_weighted_by_examples() -> None:
    """Client 0 with one row, client 1 with three rows of x = 2 and one batch of them: .8 and .2 meet at .35."""
    plan = SplitFedV1()
    engine = two_clients(placement=plan.placement(two_clients().topology), rows=(1, 3))
    one_round(engine, plan, Training(8))
    assert weight(engine, "server") == single(STEP0 / 4 + STEP1 * 3 / 4)
    assert weight(engine, FED) == single(0.35)


def test_a_topology_without_a_shared_party_is_refused_where_one_is_needed() -> None:
    own = two_clients().topology
    heads = (Head("out", "server", "server", own.heads[0].task),)
    alone = Topology("private", own.segments, own.inputs, heads)
    for plan in (Blind(), Sglr(), SplitFedV3()):
        with pytest.raises(InvalidInput, match=r"topology 'private' has no party without data"):
            plan.check(alone, 2)
