"""Secure sums: the sum is the plain mean to its precision, no upload shows, and drop-outs take nothing with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.engines.base import FED
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.poisoning import SignFlip
from splitfed.schedules import Blind, LocalLoss, SplitFedV1, SplitFedV2, SplitFedV3
from splitfed.schedules.base import Schedule, Training
from splitfed.secure_sum.base import Residues
from splitfed.secure_sum.keys import PRIME, Setup, reconstruct, share
from splitfed.secure_sum.masked_sum import SecureSum, unmask_sum
from splitfed.secure_sum.member import Member
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.core.test_participation import engine_for
from tests.core.test_vanilla_by_hand import two_clients
from tests.examples import assert_same, toy_data
from tests.training.test_resume import Eventful, Stop, stop_after

PLAN = SecureSum()


def test_shares_by_hand() -> None:
    """7 + 3 x at 1, 2 and 3."""
    shares = share(7, (0, 1, 2), [3])
    assert shares == {0: 10, 1: 13, 2: 16}
    assert reconstruct({2: 16, 0: 10}, 2) == 7


def test_every_threshold_of_shares_gives_the_secret_and_fewer_do_not() -> None:
    shares = share(PRIME - 5, range(5), [11, PRIME - 1])
    for left in ((0, 1, 2), (4, 2, 0), (1, 3, 4)):
        assert reconstruct({member: shares[member] for member in left}, 3) == PRIME - 5
    with pytest.raises(InvalidInput, match=r"^2 shares are not enough; expected 3 or more$"):
        reconstruct({0: shares[0], 1: shares[1]}, 3)
    # Two shares fit any secret: through them and every value at 0 goes one parabola.
    assert reconstruct({0: shares[0], 1: shares[1]}, 2) != PRIME - 5


def test_encoding_by_hand() -> None:
    """Four bits behind the point, weight 2: .5 is 16, -.25 is -8, a count of 3 is 6, and the weight comes last."""
    plan = SecureSum(bits=4)
    parts = {"w": torch.tensor([0.5, -0.25]), "n": torch.tensor(3)}
    coded = plan.encode(parts, 2.0, "client0")
    assert coded.tolist() == [16, 2**64 - 8, 6, 2]
    total: Residues = coded + plan.encode({"w": torch.tensor([-1.5, 0.75]), "n": torch.tensor(5)}, 1.0, "client1")
    mean = plan.decode(total, parts)
    # (2 * .5 - 1.5) / 3, (-.5 + .75) / 3, and 11 / 3 rounded.
    assert mean["w"].tolist() == pytest.approx([-0.5 / 3, 0.25 / 3])
    assert (int(mean["n"]), mean["n"].dtype) == (4, torch.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SecureSum(bits=0), r"^secure bits=0 is not allowed"),
        (lambda: SecureSum(bits=41), r"^secure bits=41 is not allowed"),
        (lambda: SecureSum(limit=0.0), r"^secure limit=0.0 is not allowed"),
        (lambda: SecureSum(threshold=1), r"^secure threshold=1 is not allowed; expected a whole number of at least 2$"),
        (lambda: PLAN.check(1), r"^a secure sum of 1 upload is that upload: let 2 clients or more take part$"),
        (
            lambda: SecureSum(threshold=5).check(4),
            r"^secure threshold=5 is not allowed; 4 clients take part in a round$",
        ),
        (lambda: PLAN.check_weights([0.5]), r"^a weight of 0.5 in a secure sum is not allowed"),
        (lambda: PLAN.check_weights([2.0**24]), r"^secure bits=24 and limit=64 do not fit weights of 16777216 at most"),
        (
            lambda: PLAN.encode({"w": torch.tensor([1.0, -65.0])}, 1.0, "client3"),
            r"^client3's 'w' reaches 65, beyond the range of the secure sum; secure limit=64 must be larger$",
        ),
        (lambda: PLAN.encode({"w": torch.tensor([float("nan")])}, 1.0, "client3"), r"^client3's 'w' reaches nan"),
        (lambda: SplitFedV1(secure={"bit": 3}), r"^unknown parameter of secure 'bit'; did you mean 'bits'"),
        (
            lambda: SplitFedV1(secure="yes"),
            r"^secure='yes' is not allowed; expected true, false, 'masks', 'ckks', a table",
        ),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            SplitFedV1(secure=True, aggregation="median"),
            r"^aggregation=Median\(\) reads every upload, but secure shows the server their sum only: set one$",
        ),
        (SplitFedV3(secure=True), r"^secure has nothing to act on: no client uploads weights here$"),
        (Blind(secure=True), r"^secure has nothing to act on"),
        (SplitFedV1(secure=True, clients_per_round=1), r"^a secure sum of 1 upload is that upload"),
    ],
)
def test_a_schedule_refuses(plan: Schedule, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan.check(two_clients().topology, 4)


def members(count: int, threshold: int, seed: int = 0) -> tuple[dict[int, Member], dict[int, dict[int, bytes]]]:
    """Members that have their keys and each other's shares, and the public rows."""
    setup = Setup(seed, "test")
    found = {i: Member(i, range(count), threshold, setup) for i in range(count)}
    rows = {i: setup.row(i, member.others) for i, member in found.items()}
    for i, member in found.items():
        member.accept(rows[i])
    sent = {i: member.shares() for i, member in found.items()}
    for i, member in found.items():
        member.take({other: sent[other][i] for other in member.others})
    return found, rows


@pytest.mark.parametrize("gone", [(), (2,), (0, 3)])
def test_the_sum_survives_drop_outs(gone: tuple[int, ...]) -> None:
    """Who leaves after the shares were passed round, and before it sends, is left out, and its masks are lifted."""
    found, rows = members(5, 3)
    left = [i for i in found if i not in gone]
    values = {i: np.array([i + 1, 2**64 - 1 - i, 2**63 + i], dtype=np.uint64) for i in left}
    masked = {i: found[i].mask_values(values[i]) for i in left}
    revealed = {i: found[i].reveal(left) for i in left}
    expected = [sum(int(v[k]) for v in values.values()) % 2**64 for k in range(3)]
    assert unmask_sum(masked, revealed, rows, 3).tolist() == expected
    plain = [sum(int(v[k]) for v in masked.values()) % 2**64 for k in range(3)]
    assert plain != expected, "without the shares the masks stay"


def test_below_the_threshold_the_sum_is_lost() -> None:
    found, rows = members(4, 3)
    masked = {i: found[i].mask_values(np.zeros(2, dtype=np.uint64)) for i in (0, 1)}
    with pytest.raises(
        InvalidInput,
        match=r"^member 0 reveals shares once, for 3 survivors or more; the server asked again, or for 2 survivors$",
    ):
        found[0].reveal((0, 1))
    with pytest.raises(
        InvalidInput, match=r"^1 clients remain in a secure sum that needs 3: the sum cannot be recovered$"
    ):
        unmask_sum(masked, {0: {}}, rows, 3)


def test_shares_are_revealed_once() -> None:
    """A server that names other survivors the second time would learn secret and seed of one client: its upload."""
    found, _ = members(4, 2)
    found[0].reveal((0, 1, 2, 3))
    with pytest.raises(InvalidInput, match="reveals shares once"):
        found[0].reveal((0, 1, 2))


def chi_square(values: Residues) -> float:
    """Over all bytes, 256 values each."""
    counts = np.bincount(values.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_an_upload_is_uniform_even_beside_the_pair_masks() -> None:
    """255 degrees of freedom: a chi-square over 350 has a chance of 7 in 100,000; zeros have one of millions."""
    found, _ = members(3, 2)
    plain = np.zeros(4000, dtype=np.uint64)
    sealed = found[0].mask_values(plain)
    assert chi_square(sealed) < 350 < chi_square(plain)
    # Nor do two of the three uploads add up to anything: the third's masks are missing.
    assert chi_square(sealed + found[1].mask_values(plain)) < 350
    other = members(3, 2, seed=1)[0][0].mask_values(plain)
    assert chi_square(sealed - other) < 350


@pytest.mark.parametrize("kind", [SplitFedV1, SplitFedV2, LocalLoss])
def test_the_fed_server_holds_the_plain_mean_to_the_precision(kind: type[SplitFedV1]) -> None:
    """Within 2^-25, and a rounding of single precision."""
    plain, summed = (
        go(None, schedule=kind(secure=s), rounds=1).engine.parties[FED].state.contents() for s in (False, True)
    )
    for name, tensor in plain.items():
        assert torch.allclose(tensor.double(), summed[name].double(), rtol=2**-23, atol=2**-25), name
    counts = [int(t) for name, t in summed.items() if name.endswith("num_batches_tracked")]
    assert len(counts) == 1
    assert counts[0] > 0


def assert_planned_is_counted(plan: Schedule, kind: str, rows: int, rounds: int, batch_size: int) -> None:
    """Assert that what three clients exchange by `plan` is what was planned, messages of `kind` among it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        topology = vanilla(Eventful(), "drop1")
    data = toy_data(rows).clients(3, auxiliary=10, victims=10)
    ready = prepare(topology, data, schedule=plan, defenses=(), optimizer=None, training=Training(batch_size))
    planned = cost(ready, rounds)
    run = splitfed.train(topology, data, schedule=plan, rounds=rounds, batch_size=batch_size)
    counted = {flow: n for flow, n in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert planned.flows == counted
    assert run.engine.traffic.bytes(kind=kind) > 0


def assert_two_survivors_are_needed(plan: Schedule, rounds: int) -> None:
    """Assert that of three clients two have to finish for a round that is fused; both happens within `rounds`."""
    engine = engine_for(plan, 3)
    seen = set()
    for number in range(rounds):
        done = plan.round(engine, Training(1), number, {})
        seen.add(done.averaged)
        assert done.averaged == (len(done.dropped) <= 1)
    assert seen == {True, False}


def go(folder: Path | None, stop: int | None = None, resume: bool = False, **changes: Any) -> Run:
    """Three clients with batch norm and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Eventful()
    arguments: dict[str, Any] = {
        "schedule": SplitFedV1(secure=True),
        "rounds": 3,
        "batch_size": 10,
        "logging": splitfed.Logging(folder, resume, Recording((FED,)), progress=stop_after(stop)),
        **changes,
    }
    data = toy_data(100).clients(3, auxiliary=10, victims=10)
    return splitfed.train(vanilla(model, "drop1"), data, **arguments)


def test_the_fed_server_receives_masked_numbers_alone() -> None:
    run = go(None)
    received = [m for m in run.engine.view(FED).messages if m.receiver == FED]
    assert {m.kind for m in received} == {"shares", "masked", "unmasking"}
    honest = SplitFedV1()
    assert {m.kind for m in go(None, schedule=honest).engine.view(FED).messages if m.receiver == FED} == {"weights"}
    sealed = torch.cat([m.tensors["masked"] for m in received if m.kind == "masked"])
    assert chi_square(sealed.numpy().view(np.uint64)) < 350


def test_attacks_on_updates_are_refused() -> None:
    run = go(None, rounds=1)
    with pytest.raises(InvalidInput, match="the aggregation server learns the sum of all clients' uploads"):
        run.attack("idlg", adversary=FED)


@pytest.mark.parametrize(
    "plan",
    [
        SplitFedV1(secure=True),
        SplitFedV1(secure={"threshold": 2}, buffers=False),
        SplitFedV2(secure={"threshold": 2}, drop_out=0.4),
        LocalLoss(secure=True, clients_per_round=2),
        Blind(secure=True, average=True),
    ],
    ids=repr,
)
def test_planned_equals_counted(plan: Schedule) -> None:
    assert_planned_is_counted(plan, "masked", rows=100, rounds=3, batch_size=10)


def test_bytes_by_hand() -> None:
    """Three clients, two secrets of 32 bytes for two others, one weight and the number of examples."""
    plan = SplitFedV2(secure=True)
    engine = engine_for(plan, 3)
    plan.round(engine, Training(1), 0, {})
    flows = {(f.kind, f.sender): n for f, n in engine.traffic.flows.items() if "client0" in (f.sender, f.receiver)}
    assert flows["keys", FED] == (1, 64)
    assert flows["shares", "client0"] == flows["shares", FED] == (1, 128)
    assert flows["masked", "client0"] == (1, 16)
    assert flows["survivors", FED] == (1, 24)
    assert flows["unmasking", "client0"] == (1, 96)
    assert ("weights", "client0") not in flows


def test_too_few_survivors_fuse_nothing() -> None:
    """Of three, two must finish, which no quorum asks for."""
    assert_two_survivors_are_needed(SplitFedV1(secure=True, drop_out=0.6), rounds=12)


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        go(tmp_path / "cut", stop=1)
    resumed = go(tmp_path / "cut", resume=True)
    whole = go(tmp_path / "whole")
    assert_same(resumed.engine.state()["parties"], whole.engine.state()["parties"])
    assert resumed.engine.traffic.state() == whole.engine.traffic.state()


def test_who_misbehaves_does_so_before_it_masks() -> None:
    """A secure sum hides a sign flip, and is none the less bent by it."""
    bent, plain, honest = (
        go(None, rounds=1, schedule=SplitFedV1(secure=secure), adversaries=splitfed.Adversaries(poisoning=given))
        .engine.parties[FED]
        .state.contents()
        for secure, given in ((True, SignFlip(clients=(1,))), (False, SignFlip(clients=(1,))), (True, ()))
    )
    moved = 0.0
    for name, tensor in plain.items():
        if tensor.is_floating_point():
            assert torch.allclose(bent[name], tensor, atol=1e-6), name
            moved = max(moved, float((bent[name] - honest[name]).abs().max()))
    assert moved > 1e-3


def test_a_method_that_sends_more_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"^secure hides the weights that clients upload, not the other messages of method FedProto"
    ):
        go(None, method="fedproto")
