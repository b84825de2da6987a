"""Who takes part in a round, who drops out, and what a quorum holds back."""

from __future__ import annotations

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.engines.base import FED
from splitfed.engines.local import LocalEngine
from splitfed.schedules.alternate import Alternate
from splitfed.schedules.base import Round, Schedule, Training
from splitfed.schedules.blind import Blind
from splitfed.schedules.local_loss import LocalLoss
from splitfed.schedules.sampling_and_dropout import Sampled
from splitfed.schedules.sequential import Sequential
from splitfed.schedules.sglr import Sglr
from splitfed.schedules.splitfed_v1 import SplitFedV1
from splitfed.schedules.splitfed_v2 import SplitFedV2
from splitfed.schedules.splitfed_v3 import SplitFedV3
from tests.core.test_vanilla_by_hand import two_clients, weight
from tests.examples import assert_same
from tests.thinning import thin

SHARED: list[type[Sampled]] = [Sequential, Alternate, SplitFedV1, SplitFedV2, SplitFedV3, Blind, Sglr]
AVERAGED = [SplitFedV1, SplitFedV2, SplitFedV3]


def engine_for(plan: Schedule, replicas: int, rows: tuple[int, ...] = (4,)) -> LocalEngine:
    topology = two_clients().topology
    return two_clients(placement=plan.placement(topology), replicas=replicas, rows=rows)


def quiet(plan: Schedule, replicas: int, rows: int) -> LocalEngine:
    """Clients whose data is all zeros: no weight ever moves, so nothing can diverge however long it runs."""
    engine = engine_for(plan, replicas)
    for client in range(replicas):
        engine.party(client, "client").state.own("train", {"x": torch.zeros(rows, 1)}, {"out": torch.zeros(rows)})
    return engine


def rounds(engine: LocalEngine, plan: Schedule, count: int, seed: int = 0) -> list[Round]:
    state = plan.start(engine.replicas)
    return [plan.round(engine, Training(1, seed=seed), number, state) for number in range(count)]


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize(("wanted", "count"), [(3, 3), (0.5, 3), (0.01, 1), (1.0, 5), (None, 5)])
def test_a_sample_is_drawn_anew_each_round(kind: type[Sampled], wanted: int | float | None, count: int) -> None:
    plan = kind(clients_per_round=wanted)
    found = rounds(quiet(plan, 5, 1), plan, 30)
    assert all(len(done.clients) == count and sorted(set(done.clients)) == list(done.clients) for done in found)
    assert len({done.clients for done in found}) > 1 or count == 5
    assert {client for done in found for client in done.clients} == set(range(5))


@pytest.mark.parametrize("kind", SHARED)
def test_who_is_not_asked_does_not_train(kind: type[Sampled]) -> None:
    plan = kind(clients_per_round=2)
    engine = engine_for(plan, 4)
    (done,) = rounds(engine, plan, 1)
    senders = {flow.sender for flow in engine.traffic.flows if flow.kind == "activation"}
    assert senders == {f"client{client}" for client in done.clients}
    for client in set(range(4)) - set(done.clients):
        assert weight(engine, f"client{client}") == 1.0


@pytest.mark.parametrize("kind", thin(SHARED, 2))
def test_clients_drop_out_at_the_given_rate_with_their_steps_counted(kind: type[Sampled]) -> None:
    """Of 6 x 40 turns about a tenth are cut short; each step is one activation, so no step goes uncounted."""
    plan = kind(drop_out=0.1)
    engine = quiet(plan, 6, 4)
    found = rounds(engine, plan, 40)
    share = sum(len(done.dropped) for done in found) / 240
    assert 0.04 < share < 0.17
    steps = sum(len(done.losses) for done in found)
    sent = sum(n for flow, (n, _) in engine.traffic.flows.items() if flow.kind == "activation")
    assert sent == steps < 240 * 4
    assert {len(done.losses) for done in found if not done.dropped} == {24}


@pytest.mark.parametrize("kind", [SplitFedV1, SplitFedV2])
def test_the_update_of_who_drops_out_is_left_out(kind: type[Sampled]) -> None:
    plan = kind(drop_out=0.5)
    for seed in range(20):
        engine = engine_for(plan, 2)
        (done,) = rounds(engine, plan, 1, seed)
        if done.dropped == (1,):
            assert weight(engine, FED) == weight(engine, "client0")
            assert weight(engine, "client1") != weight(engine, FED)
            uploads = [flow.sender for flow in engine.traffic.flows if flow.receiver == FED]
            assert uploads == ["client0"]
            return
    pytest.fail("no seed dropped client 1 alone")


@pytest.mark.parametrize("kind", AVERAGED)
def test_below_the_quorum_nothing_is_averaged(kind: type[SplitFedV1]) -> None:
    plan = kind(drop_out=0.9, quorum=2)
    engine = engine_for(plan, 2)
    before = engine.run_parties.shared["server"].state.state_dict()["segments"]
    seen = set()
    for number in range(10):
        done = plan.round(engine, Training(1), number, {})
        seen.add(done.averaged)
        assert done.averaged == (not done.dropped)
        if done.averaged:
            break
        if kind is not SplitFedV2:
            assert_same(engine.run_parties.shared["server"].state.state_dict()["segments"], before)
        if FED in engine.parties:
            assert weight(engine, FED) == 1.0
    assert False in seen


@pytest.mark.parametrize("kind", [Blind, Sglr])
def test_a_common_step_needs_its_quorum(kind: type[Blind]) -> None:
    """The round ends at the first step that fewer clients than the quorum are there for."""
    plan = kind(drop_out=0.7, quorum=3)
    found = rounds(engine_for(plan, 3), plan, 10)
    assert any(done.dropped for done in found)
    for done in found:
        assert len(done.losses) % 3 == 0
        assert done.averaged == (len(done.losses) == 12)


def test_everybody_may_drop_out() -> None:
    plan = SplitFedV1(drop_out=1.0)
    (done,) = rounds(engine_for(plan, 3, (1,)), plan, 1)
    assert (done.losses, done.dropped, done.averaged) == ([], (0, 1, 2), False)


def test_a_sequence_goes_on_from_the_last_client_that_finished() -> None:
    plan = Sequential(drop_out=0.5)
    for seed in range(40):
        engine = engine_for(plan, 3)
        state = plan.start(3)
        done = plan.round(engine, Training(1, seed=seed), 0, state)
        if done.dropped == (1,):
            assert state["newest"] == 2
            pairs = [(f.sender, f.receiver) for f in engine.traffic.flows if f.kind == "weights"]
            assert pairs == [("client0", "client1"), ("client0", "client2")]
            return
    pytest.fail("no seed dropped client 1 alone")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: SplitFedV1(quorum=0), "quorum=0 is not allowed; expected a whole number of at least 1"),
        (lambda: SplitFedV1(quorum=1.5), r"quorum \(a fraction\)=1.5 is not allowed; expected a number in \(0, 1\]"),
        (lambda: Blind(drop_out=1.1), r"drop_out=1.1 is not allowed; expected a number in \[0, 1\]"),
        (lambda: Sequential(clients_per_round=0), "clients_per_round=0 is not allowed"),
        (lambda: Sequential(clients_per_round=True), "clients_per_round=True is not allowed"),
        (lambda: Sequential(clients_per_round="2"), "clients_per_round='2' is not allowed"),
        (lambda: LocalLoss(server="both"), "unknown server 'both'"),
        (lambda: Sglr(phi=2.0), r"phi=2.0 is not allowed; expected a number in \[0, 1\]"),
        (lambda: Sglr(combine="average"), "unknown combine 'average'"),
    ],
)
def test_bad_numbers_are_refused(plan: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (SplitFedV1(quorum=5), "quorum=5 is not allowed; 4 clients take part in a round"),
        (Blind(quorum=3, clients_per_round=2), "quorum=3 is not allowed; 2 clients take part in a round"),
        (Sequential(clients_per_round=9), "clients_per_round=9 is not allowed; there are 4 clients"),
    ],
)
def test_more_than_there_are_is_refused(plan: Schedule, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan.check(two_clients().topology, 4)
