"""Private class sums: sensitivity, ledger and audit by hand, mechanisms that are broken on purpose, and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.privacy_events import Event, Gaussian, Neighbours, Protects
from splitfed.core.random import generator, stream
from splitfed.defenses.private_class_sums import NoisyMeans, PrivateClassSums, message_noise
from splitfed.engines.base import FED
from splitfed.federated import FedProto
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import prepare
from splitfed.privacy.accountants import compose
from splitfed.privacy.gaussian_mechanism import gaussian_epsilon
from splitfed.schedules import Sequential
from splitfed.schedules.base import Training
from splitfed.study.run.audit import audit
from splitfed.topologies import local, vanilla

ONE, TEN = "one release", "ten releases in a row"
Z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.5]])
Y = torch.tensor([0, 0, 2])


def frozen(shape: str = "local", learns: bool = False) -> sf.Topology:
    """A perceptron whose first segment, up to the embedding, does not learn."""
    with stream(0):
        model = mlp((1, 8, 8), 10, (16, 12), seed=None)
    topology = local(model, ("relu1",)) if shape == "local" else vanilla(model, "relu1")
    topology.segments[0].module.requires_grad_(learns)
    return topology


def go(private: Any, shape: str = "local", rounds: int = 2, **changes: Any) -> sf.Run:
    data = sf.data.digits().rows(range(120)).clients(3, auxiliary=10, victims=10, classes_per_client=4, seed=0)
    return sf.train(
        changes.pop("topology", None) or frozen(shape),
        data,
        rounds=rounds,
        batch_size=64,
        schedule="independent" if shape == "local" else Sequential(hand_over="none"),
        method=FedProto(private=private, **changes),
        evaluation=sf.Evaluation(every=rounds),
        logging=sf.Logging(record=Recording((FED,))),
    )


@cache
def private_run(shape: str = "local") -> sf.Run:
    return go({"clip": 1.0, "noise_multiplier": 2.0}, shape)


def test_sums_and_counts_by_hand() -> None:
    """(3, 4) is clipped to (.6, .8); of class 1 there is none; the last column is the clip times the count."""
    found = PrivateClassSums(clip=1.0, noise_multiplier=1.0).sums(Z, Y, 3)
    assert found.flatten().tolist() == pytest.approx([0.9, 1.2, 2.0, 0, 0, 0, 0, 0.5, 1.0], abs=1e-6)
    quiet = PrivateClassSums(clip=1.0, noise_multiplier=1e-9).release(Z, Y, 3, generator(0))
    assert quiet.counts.tolist() == pytest.approx([2, 0, 1], abs=1e-6)
    # Where there is none the sum is divided by one.
    assert quiet.means.flatten().tolist() == pytest.approx([0.45, 0.6, 0, 0, 0, 0.5], abs=1e-6)


@pytest.mark.parametrize("clip", [0.1, 1.0, 30.0])
def test_a_row_more_moves_a_message_by_the_sensitivity_at_most(clip: float) -> None:
    mechanism, random = PrivateClassSums(clip=clip, noise_multiplier=1.0), generator(1)
    largest = 0.0
    for size in (1e-3, 1.0, 1e6):
        z, y = size * torch.randn(8, 5, generator=random), torch.randint(4, (8,), generator=random)
        for row in range(8):
            rest = torch.arange(8) != row
            change = mechanism.sums(z, y, 4) - mechanism.sums(z[rest], y[rest], 4)
            largest = max(largest, float(change.norm()))
    assert largest <= mechanism.sensitivity * (1 + 1e-9)
    # And a long row by all of it.
    assert largest >= mechanism.sensitivity * (1 - 1e-6)


def test_noise_has_its_deviation_and_is_drawn_afresh_for_every_message() -> None:
    mechanism = PrivateClassSums(clip=2.0, noise_multiplier=1.5)
    drawn = {
        place: mechanism.release(torch.zeros(1, 400), torch.zeros(1, dtype=torch.int64), 50, message_noise(*place))
        for place in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
    }
    noise = {place: one.means * one.counts.clamp_min(1.0)[:, None] for place, one in drawn.items()}
    for found in noise.values():
        # 20 000 numbers: a standard error of half a per cent.
        assert float(found.std()) == pytest.approx(1.5 * math.sqrt(2) * 2.0, rel=0.03)
    flat = torch.stack([one.flatten() for one in noise.values()])
    assert float((torch.corrcoef(flat) - torch.eye(4)).abs().max()) < 0.05


def test_epsilon_of_a_run_is_that_of_a_message_a_round_by_hand() -> None:
    run = private_run()
    (total,) = run.ledger.totals
    event = Event(Gaussian(2.0), Protects.MESSAGES, neighbours=Neighbours.ADD_REMOVE)
    assert total.epsilon == pytest.approx(compose([(event, 2)], run.ledger.delta).epsilon)
    # Two Gaussians of multiplier 2 are one of 2 / sqrt(2), whatever the number of classes.
    assert total.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2), run.ledger.delta))
    assert (total.unit, total.neighbours, total.note) == ("example", str(Neighbours.ADD_REMOVE), "")
    assert run.ledger.open == {}
    assert run.epsilon == total.epsilon
    assert run.ledger.lines[0].uses == 2


@pytest.mark.parametrize("shape", ["local", "vanilla"])
def test_planned_is_counted(shape: str) -> None:
    run = private_run(shape)
    plan: Any = "independent" if shape == "local" else Sequential(hand_over="none")
    method = FedProto(private={"clip": 1.0, "noise_multiplier": 2.0})
    ready = prepare(
        frozen(shape), run.data, schedule=plan, defenses=(), optimizer=None, training=Training(64), method=method
    )
    assert planned_ledger(ready, 2, 2).as_dict() == run.ledger.as_dict()
    assert cost(ready, 2).flows == {f: n for f, n in run.engine.traffic.flows.items() if f.phase == "train"}
    # On split models the releases of the frozen segment cross without a promise, and the ledger says so.
    assert any(said.startswith("releases on") for said in run.ledger.open) == (shape == "vanilla")


def test_every_client_sends_every_class_and_few_noisy_rows_are_left_out() -> None:
    run = private_run()
    for message in run.engine.view(FED).messages:
        if message.receiver == FED:
            assert {name for name in message.tensors if name.isdecimal()} == {str(label) for label in range(10)}
    quiet = go({"clip": 50.0, "noise_multiplier": 1e-6}, rounds=1)
    exact = go(None, rounds=1)
    assert quiet.method_state["prototypes"].keys() == exact.method_state["prototypes"].keys()
    for name, mean in exact.method_state["prototypes"].items():
        assert torch.allclose(quiet.method_state["prototypes"][name], mean, atol=1e-2)
    assert go({"clip": 1.0, "noise_multiplier": 1e-6, "least": 1e6}, rounds=1).method_state["prototypes"] == {}


def audited(mechanism: PrivateClassSums) -> dict[str, bool]:
    """What was audited -> whether it is compatible with the claim, at every one of the clients."""
    held: dict[str, bool] = {}
    for line in audit(go(mechanism, rounds=1), 4000)["mechanisms"]:
        assert line["place"] == "prototype->fed_server"
        held[line["audited"]] = held.get(line["audited"], True) and line["held"]
    return held


@dataclass(frozen=True)
class HalfTheNoise(PrivateClassSums):
    def release(self, z: Tensor, y: Tensor, classes: int, random: torch.Generator) -> NoisyMeans:
        assert self.noise_multiplier is not None
        right = PrivateClassSums(self.clip, self.noise_multiplier / 2)
        return right.release(z, y, classes, random)


@dataclass(frozen=True)
class NoClipping(PrivateClassSums):
    def sums(self, z: Tensor, y: Tensor, classes: int) -> Tensor:
        rows = torch.cat([z.double(), torch.full_like(z[:, :1], self.clip).double()], 1)
        return rows.new_zeros(classes, rows.shape[1]).index_add_(0, y, rows)


@dataclass(frozen=True)
class CountsOutsideTheSensitivity(PrivateClassSums):
    """Noise for the embedding alone, the count beside it."""

    def release(self, z: Tensor, y: Tensor, classes: int, random: torch.Generator) -> NoisyMeans:
        assert self.noise_multiplier is not None
        right = PrivateClassSums(self.clip, self.noise_multiplier / math.sqrt(2))
        return right.release(z, y, classes, random)


@dataclass(frozen=True)
class RepeatedNoise(PrivateClassSums):
    def release(self, z: Tensor, y: Tensor, classes: int, random: torch.Generator) -> NoisyMeans:
        return super().release(z, y, classes, generator(int(z.shape[0] > 3 * classes)))


def test_the_audit_finds_no_more_than_the_claim_and_nearly_all_of_it() -> None:
    found = audit(private_run(), 8000)
    assert found["held"]
    assert {line["party"] for line in found["mechanisms"]} == {f"client{i}" for i in range(3)}
    for line in found["mechanisms"]:
        assert line["sensitivity"] is None or line["sensitivity"]["held"]
        assert line["found"]["epsilon"] <= line["claimed"] < line["most"]
        # 8000 samples, at the confidence of one line of six: more than three fifths of the truth are found.
        assert line["found"]["epsilon"] > 0.6 * line["claimed"]


@pytest.mark.parametrize("broken", [HalfTheNoise, NoClipping, CountsOutsideTheSensitivity])
def test_the_audit_refutes_a_broken_mechanism(broken: type[PrivateClassSums]) -> None:
    assert audited(broken(clip=1.0, noise_multiplier=2.0)) == {ONE: False, TEN: False}


def test_the_audit_refutes_noise_that_is_repeated() -> None:
    assert audited(RepeatedNoise(clip=1.0, noise_multiplier=2.0)) == {ONE: True, TEN: False}


def test_attacks_read_what_is_sent() -> None:
    """With little noise counts give shares away; with much of it they do not."""
    clear, noisy = (go({"noise_multiplier": m}, rounds=1).attack("class_shares")[0] for m in (1e-3, 1e3))
    assert clear.scores["attack"]["total_variation"].mean < 0.01
    assert noisy.scores["attack"]["total_variation"].mean > 0.2


class Centred(nn.Module):
    """Subtracts the mean of its batch, where `always` or in evaluation mode, in which prototypes are made."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and not self.always else x - x.mean(0)


@pytest.mark.parametrize("shape", ["local", "vanilla"])
@pytest.mark.parametrize("always", [True, False], ids=["in both modes", "in evaluation mode"])
def test_a_frozen_embedding_that_mixes_rows_is_refused(shape: str, always: bool) -> None:
    """One row more moves the embedding of all: no claim about a sum of clipped ones holds for it."""
    with stream(0):
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
        model = nn.Sequential(body, nn.Linear(12, 10))
    topology = local(model, ("0",)) if shape == "local" else vanilla(model, "0")
    first, *rest = topology.segments
    front = nn.Sequential(Centred(always), body).requires_grad_(False)
    topology = replace(topology, segments=(replace(first, module=front), *rest))
    with pytest.raises(InvalidInput, match=r"fedproto private bounds .* mixes the rows of a batch"):
        go({"noise_multiplier": 1.0}, shape, topology=topology)


def test_what_cannot_be_promised_is_refused() -> None:
    at = {"noise_multiplier": 1.0}
    with pytest.raises(InvalidInput, match=r"segment 'body' learns from all rows, .* take gaussian_release with on="):
        go(at, topology=frozen(learns=True))
    for given, text in (
        ({}, "private takes a noise_multiplier, or the epsilon of one message; give one"),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, "private takes a noise_multiplier, or the epsilon"),
        ({"noise": 1.0}, "'noise' is not allowed|unknown parameter of private|parameter of private"),
        ({"clip": 0.0, **at}, "private clip=0"),
        (3, "private=3 is not allowed; expected a table"),
    ):
        with pytest.raises(InvalidInput, match=text):
            FedProto(private=given)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="fedproto private adds a client's whole noise to what secure hides"):
        FedProto(private=at, secure=True)
    assert PrivateClassSums(epsilon=1.0, delta=1e-5).multiplier == pytest.approx(3.73, abs=0.01)
