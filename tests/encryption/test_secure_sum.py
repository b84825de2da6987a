"""Secure sums of both kinds: plain sums to precision with drop-outs; under CKKS what the server sees, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Recording
from splitfed.encryption import EncryptedSum, secure_sum as encrypted_sum
from splitfed.encryption.ciphertexts import SLOTS, load_ciphertexts, message_bytes
from splitfed.encryption.key_search import find_secret_keys
from splitfed.encryption.keys import KeyHolder, to_uint8
from splitfed.encryption.secure_sum import public_context_bytes, read_public_context
from splitfed.engines.base import FED
from splitfed.engines.secure_summation import SecureSummation
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.poisoning import SignFlip
from splitfed.schedules import Blind, LocalLoss, SplitFedV1, SplitFedV2
from splitfed.schedules.base import Schedule, Training
from splitfed.secure_sum import SecureSum, SecureSumPlan
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.core.test_participation import engine_for
from tests.examples import assert_same, toy_data
from tests.secure_sum.test_secure_sum import assert_planned_is_counted, assert_two_survivors_are_needed, go
from tests.training.test_resume import Eventful, Stop

PLAN = EncryptedSum()
FEW = EncryptedSum(threshold=2)
CKKS = SplitFedV1(secure="ckks")
TO_SERVER = {"public context", "encrypted weight", "total weight", "encrypted", "mean"}


class Link:
    """Delivers messages, notes them, and lets a test change what the server or a client gets."""

    def __init__(self, change: Callable[[Message], Tensor] | None = None) -> None:
        self.messages: list[Message] = []
        self.change = change

    def __call__(self, message: Message) -> Message:
        self.messages.append(message)
        return message if self.change is None else message._replace(tensors={message.kind: self.change(message)})

    def flows(self) -> dict[tuple[str, str, str], int]:
        found: dict[tuple[str, str, str], int] = {}
        for message in self.messages:
            key = message.kind, message.sender, message.receiver
            found[key] = found.get(key, 0) + message.nbytes
        return found


def uploads(members: list[int], count: int = 40) -> tuple[dict[int, dict[str, Tensor]], dict[int, float]]:
    """Numbers of magnitude 50 and less, one of which is a client's number, and weights from 1 on."""
    made = {
        i: {
            "w": torch.rand(count, generator=torch.Generator().manual_seed(i), dtype=torch.float64) * 100 - 50,
            "steps": torch.tensor(100 + i),
        }
        for i in members
    }
    return made, {i: float(1 + 13 * i) for i in members}


def mean_of(made: dict[int, dict[str, Tensor]], weights: dict[int, float], name: str) -> Tensor:
    total = sum(weights.values())
    return torch.stack([made[i][name].double() * (weights[i] / total) for i in made]).sum(0)


def summed(plan: SecureSumPlan, asked: list[int], left: list[int], link: Link, count: int = 40) -> dict[str, Tensor]:
    """One sum of the clients `asked`, of whom those that are `left` upload."""
    names = {i: f"client{i}" for i in asked}
    made, weights = uploads(left, count)
    return SecureSummation(plan, "client", names, 0, 7, link).open().close(made, weights)


@pytest.mark.parametrize("plan", [SecureSum(threshold=2), FEW], ids=["masks", "ckks"])
@pytest.mark.parametrize(
    ("clients", "before", "during"),
    [(2, 0, 0), (3, 0, 1), (3, 1, 0), (10, 2, 3), (50, 5, 10), (50, 0, 0)],
)
def test_the_sum_is_the_plain_sum_to_precision(plan: SecureSumPlan, clients: int, before: int, during: int) -> None:
    """Who is not there when the round opens, and who leaves between that and the upload, is left out."""
    asked = list(range(before, clients))
    left = [i for i in asked if i % 5 != 2 or not during][during % 5 :] if during > 1 else asked[during:]
    assert (len(left) < len(asked)) == bool(during)
    link = Link()
    found = summed(plan, asked, left, link)
    made, weights = uploads(left)
    largest = PLAN.precision(len(left)) if isinstance(plan, EncryptedSum) else 2.0 ** -(plan.bits + 1)  # type: ignore[attr-defined]
    # Beside it, what doubles of this size lose where they are added in another order.
    assert float((found["w"] - mean_of(made, weights, "w")).abs().max()) <= largest + 2**-45
    assert int(found["steps"]) == round(float(mean_of(made, weights, "steps")))
    assert found["steps"].dtype == torch.int64
    # The messages are those that a plan counts, to the byte.
    planned: dict[tuple[str, str, str], int] = {}
    names = "client{}".format
    for flows in (plan.setup_flows(asked, names, FED), plan.upload_flows(asked, left, 41, names, FED)):
        for kind, sender, receiver, size in flows:
            planned[kind, sender, receiver] = planned.get((kind, sender, receiver), 0) + size
    assert link.flows() == planned


def test_a_mean_by_hand() -> None:
    """Four bits: (1 * .5 + 3 * -.25) / 4 by shares rounded to sixteenths: .125 and -.1875; counts (8 + 3 * 4) / 4."""
    plan = EncryptedSum(bits=4)
    made = {0: {"w": torch.tensor([0.5])}, 1: {"w": torch.tensor([-0.25])}}
    found = SecureSummation(plan, "client", {0: "a", 1: "b"}, 0, 0, Link()).open().close(made, {0: 1.0, 1: 3.0})
    assert found["w"].tolist() == [0.125 - 0.1875]
    fine = {0: {"n": torch.tensor(8)}, 1: {"n": torch.tensor(4)}}
    found = SecureSummation(PLAN, "client", {0: "a", 1: "b"}, 0, 0, Link()).open().close(fine, {0: 1.0, 1: 3.0})
    assert found["n"].tolist() == 5


def test_the_mean_does_not_depend_on_the_keys_nor_show_the_error_of_decryption() -> None:
    """What the key holder sends is the sum of the rounded shares, to the bit: keys and noise are not in it."""
    links = Link(), Link()
    means = [summed(PLAN, [0, 1, 2], [0, 1, 2], link, 3000) for link in links]
    assert_same(means[0], means[1])
    made, weights = uploads([0, 1, 2], 3000)
    steps = sum(PLAN.share(PLAN.encode(made[i], ""), weights[i] / sum(weights.values())) for i in made) * 2.0**PLAN.bits
    for link in links:
        (mean,) = [m.tensors["mean"] for m in link.messages if m.kind == "mean"]
        assert mean.tolist() == torch.as_tensor(steps).round().long().tolist()
    first, second = ([m.tensors for m in link.messages if m.kind == "encrypted"] for link in links)
    assert not torch.equal(first[0]["encrypted"], second[0]["encrypted"])


def test_the_server_gets_ciphertexts_and_no_secret_key() -> None:
    link = Link()
    summed(PLAN, [0, 1, 2], [0, 1, 2], link)
    received = [m for m in link.messages if m.receiver == FED]
    assert {m.kind for m in received} == TO_SERVER
    context = read_public_context(next(m for m in received if m.kind == "public context").tensors["public context"])
    # Nobody but the key holder gets the key: not even the other clients.
    assert find_secret_keys(link.messages, context) == []
    for message in received:
        if message.kind in ("encrypted", "encrypted weight"):
            load_ciphertexts(message.tensors[message.kind], context)
    # Two clients with the same numbers send nothing alike.
    one, two, *_ = (m.tensors["encrypted"].numpy() for m in received if m.kind == "encrypted")
    assert (one == two).mean() < 0.1


def test_a_key_that_is_left_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same walk over a protocol that sends the whole key pair instead of its public part."""

    def careless(public: Any) -> Tensor:
        return to_uint8(made[-1]._context.serialize(True, True, False, False))

    made: list[KeyHolder] = []
    make = encrypted_sum.make_sum_keys
    monkeypatch.setattr(encrypted_sum, "make_sum_keys", lambda p: made.append(make(p)) or made[-1])
    monkeypatch.setattr(encrypted_sum, "public_context_message", careless)
    link = Link()
    with pytest.raises(InvalidInput, match="holds no public context"):
        summed(PLAN, [0, 1], [0, 1], link)
    found = find_secret_keys([m for m in link.messages if m.receiver == FED], made[0].public)
    assert len(found) == 1
    assert "Tensor" in found[0]


@cache
def recorded() -> Run:
    """One round of three clients, of which the aggregation server's view is kept."""
    return go(None, rounds=1, schedule=CKKS)


def test_nothing_that_a_run_leaves_at_the_server_has_a_secret_key(tmp_path: Path) -> None:
    run = recorded()
    received = [m for m in run.engine.view(FED).messages if m.receiver == FED]
    assert {m.kind for m in received} == TO_SERVER
    context = read_public_context(next(m for m in received if m.kind == "public context").tensors["public context"])
    held = [run.engine.view(FED), run.engine.parties[FED], run.engine.link, run.engine.state()]
    assert find_secret_keys(held, context) == []
    with pytest.raises(InvalidInput, match="the aggregation server learns the sum of all clients' uploads"):
        run.attack("idlg", adversary=FED)


def test_a_run_ends_within_precision_of_the_plain_one() -> None:
    """After one round: a rounding of single precision more than the sum's own."""
    plain = go(None, rounds=1, schedule=SplitFedV1()).engine.parties[FED].state.contents()
    for name, tensor in recorded().engine.parties[FED].state.contents().items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor.double(), plain[name].double(), rtol=2**-23, atol=PLAN.precision(3)), name


def test_a_resumed_run_ends_in_the_same_bits_without_a_key_file(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        go(tmp_path / "cut", stop=1, schedule=CKKS)
    resumed = go(tmp_path / "cut", resume=True, schedule=CKKS)
    whole = go(None, schedule=CKKS, logging=splitfed.Logging(record=Recording((FED,))))
    assert_same(resumed.engine.state()["parties"], whole.engine.state()["parties"])
    assert resumed.engine.traffic.state() == whole.engine.traffic.state()


@pytest.mark.parametrize(
    "plan",
    [
        SplitFedV1(secure="ckks", buffers=False),
        SplitFedV2(secure={"name": "ckks", "threshold": 2}, drop_out=0.4),
        LocalLoss(secure=EncryptedSum(limit=8.0), clients_per_round=2),
        pytest.param(Blind(secure="ckks", average=True), marks=pytest.mark.exhaustive),
    ],
    ids=lambda plan: type(plan).__name__,
)
def test_planned_equals_counted(plan: Schedule) -> None:
    assert_planned_is_counted(plan, "encrypted", rows=60, rounds=2, batch_size=20)


def test_messages_by_hand() -> None:
    """Three clients with one weight each: client0, the first that finished, holds the keys."""
    plan = SplitFedV2(secure="ckks")
    engine = engine_for(plan, 3)
    plan.round(engine, Training(1), 0, {})
    flows = {(f.kind, f.sender, f.receiver): n for f, n in engine.traffic.flows.items() if f.kind in TO_SERVER}
    context, vector = public_context_bytes(PLAN.parameters), message_bytes(PLAN.parameters, SLOTS, (1, 1))
    expected = {("mean", "client0", FED): (1, 8), ("total weight", "client0", FED): (1, 8)}
    expected |= {("public context", "client0", FED): (1, context)}
    for other in ("client1", "client2"):
        expected |= {("public context", FED, other): (1, context), ("total weight", FED, other): (1, 8)}
    for kind in ("encrypted weight", "encrypted"):
        expected |= {(kind, f"client{i}", FED): (1, vector) for i in range(3)}
        expected |= {(kind, FED, "client0"): (1, vector)}
    assert flows == expected


def test_too_few_survivors_aggregate_nothing() -> None:
    assert_two_survivors_are_needed(SplitFedV1(secure="ckks", drop_out=0.6), rounds=8)


def test_who_misbehaves_does_so_before_it_encrypts() -> None:
    """Encryption hides a sign flip, and the mean is none the less bent by it."""
    bent, plain = (
        go(None, rounds=1, schedule=SplitFedV1(secure=secure), adversaries=splitfed.Adversaries(poisoning=SignFlip()))
        .engine.parties[FED]
        .state.contents()
        for secure in ("ckks", False)
    )
    for name, tensor in plain.items():
        if tensor.is_floating_point():
            assert torch.allclose(bent[name], tensor, atol=1e-6), name


def changed_to_server(kind: str, change: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    """One sum in which what the server gets of a kind is not what was sent."""

    def alter(message: Message) -> Tensor:
        tensor = message.tensors[message.kind]
        return change(tensor) if (message.kind, message.receiver) == (kind, FED) else tensor

    return lambda: summed(PLAN, [0, 1], [0, 1], Link(alter))


def flip(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[20000] ^= 1
    return changed


def foreign(tensor: Tensor) -> Tensor:
    """Return what a client of another sum, with other keys, has sent."""
    link = Link()
    summed(PLAN, [0, 1], [0, 1], link)
    return next(m.tensors["encrypted"] for m in link.messages if m.kind == "encrypted")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncryptedSum(bits=0), r"^secure bits=0 is not allowed"),
        (lambda: EncryptedSum(bits=41), r"^secure bits=41 is not allowed"),
        (lambda: EncryptedSum(limit=0.0), r"^secure limit=0.0 is not allowed"),
        (lambda: EncryptedSum(threshold=1), r"^secure threshold=1 is not allowed"),
        (
            lambda: EncryptedSum(bits=32),
            r"^secure bits=32 and limit=64 are too fine for 2 clients under CKKS: a sum has errors up to 2\.2e-10",
        ),
        (lambda: EncryptedSum(limit=1e5), r"^secure bits=26 and limit=100000 are too fine for 2 clients under CKKS"),
        (lambda: EncryptedSum(limit=1e20), r"^limit=1e\+20 is beyond the scale"),
        (lambda: PLAN.check(1), r"^a secure sum of 1 upload is that upload"),
        (lambda: PLAN.check(3000), r"are too fine for 3000 clients under CKKS"),
        (lambda: EncryptedSum(threshold=5).check(4), r"^secure threshold=5 is not allowed; 4 clients take part"),
        (lambda: PLAN.check_weights([0.5]), r"^a weight of 0.5 in a secure sum is not allowed"),
        (lambda: PLAN.check_weights([2.0**30] * 3), r"^weights of 3221225472 in all are not allowed"),
        (
            lambda: PLAN.encode({"w": torch.tensor([1.0, -65.0])}, "client3"),
            r"^client3's 'w' reaches 65, beyond the declared 64; secure limit=64 must be larger$",
        ),
        (lambda: PLAN.encode({"w": torch.tensor([float("nan")])}, "client3"), r"^client3's 'w' reaches nan"),
        (
            lambda: PLAN.encode({"n": torch.tensor(2**20 + 1)}, "client3"),
            r"^client3's 'n' reaches 1\.04858e\+06, beyond the declared 1\.04858e\+06",
        ),
        (lambda: PLAN.encode({}, "client3"), r"^client3 has nothing to encrypt"),
        (
            lambda: summed(PLAN, [0, 1, 2], [0], Link()),
            r"^1 clients remain in a secure sum that needs 2: the sum cannot be recovered",
        ),
        (changed_to_server("encrypted", flip), r"^ciphertexts of 62118 bytes are corrupted or truncated"),
        (changed_to_server("encrypted weight", lambda t: t[:-1].clone()), r"^ciphertexts of 62117 bytes are corrupted"),
        (changed_to_server("encrypted", foreign), r"^the ciphertexts belong to another key pair"),
        (changed_to_server("public context", flip), r"^the public context is corrupted or truncated"),
        (lambda: SplitFedV1(secure="ckk"), r"^secure='ckk' is not allowed; expected true, false, 'masks', 'ckks', a"),
        (lambda: SplitFedV1(secure={"name": "ckks", "bit": 3}), r"^unknown parameter of secure 'bit'; did you mean"),
        (
            lambda: go(None, rounds=1, schedule=SplitFedV1(secure={"name": "ckks", "limit": 2.0**-9, "bits": 30})),
            r"^client\d's '[\w./]+' reaches .* beyond the declared",
        ),
    ],
)
def test_refusals(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_a_number_beyond_the_limit_is_refused_before_anything_leaves() -> None:
    link = Link()
    made, weights = uploads([0, 1, 2])
    made[2]["w"][7] = 64.5
    names = {i: f"client{i}" for i in made}
    with pytest.raises(InvalidInput, match=r"^client2's 'w' reaches 64\.5"):
        SecureSummation(PLAN, "client", names, 0, 7, link).open().close(made, weights)
    assert link.messages == []


def test_without_tenseal_a_run_is_planned_and_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tenseal", "tenseal.sealapi"):
        monkeypatch.setitem(sys.modules, name, None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        topology = vanilla(Eventful(), "drop1")
    data = toy_data(60).clients(3, auxiliary=10, victims=10)
    ready = prepare(topology, data, schedule=CKKS, defenses=(), optimizer=None, training=Training(20))
    assert cost(ready, 1).flows
    with pytest.raises(InvalidInput, match=r"^encryption needs the package tenseal: pip install"):
        splitfed.train(topology, data, schedule=CKKS, rounds=1, batch_size=20)
    splitfed.train(topology, data, schedule=SplitFedV1(secure="masks"), rounds=1, batch_size=20)
