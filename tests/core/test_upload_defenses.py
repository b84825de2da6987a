"""Defenses on what clients of a federated method send: by hand, counted, accounted for, never drawn twice, refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import splitfed as sf
from splitfed.cli import main
from splitfed.core.defense import UPLOAD, Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.privacy_events import Event, Gaussian, Neighbours, Protects
from splitfed.core.random import stream
from splitfed.core.upload_defenses import Keeper, Sent, apply_upload_defenses, rows_of, size
from splitfed.defenses import DistanceCorrelation, GaussianRelease, LaplaceRelease, Noise, Quantization
from splitfed.engines.base import FED
from splitfed.federated import FedProto, Learner, Method
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import prepare
from splitfed.privacy.accountants import compose
from splitfed.schedules import Sequential
from splitfed.schedules.base import Training
from splitfed.topologies import local, vanilla
from tests.examples import assert_same
from tests.study.examples import checked, small, write

AT = ("prototype->fed_server",)
PRIVATE = GaussianRelease(clip=1.0, noise_multiplier=2.0, on=AT)


@dataclass(frozen=True, kw_only=True)
class Twice(Method):
    """Every client sends the same numbers twice a round."""

    def aggregate(
        self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: dict[str, Any]
    ) -> None:
        for learner in learners:
            for _ in range(2):
                learner.send("note", {"a": torch.zeros(3, 2), "b": torch.tensor(4)}, number)


def data(clients: int = 3) -> Any:
    return sf.data.digits().clients(clients, dirichlet=0.5, auxiliary=10, victims=8)


def shaped(shape: str) -> sf.Topology:
    with stream(0):
        model = mlp((1, 8, 8), 10, (16, 12), seed=None)
    return local(model, ("relu1",)) if shape == "local" else vanilla(model, "relu1")


def go(*guards: Defense, shape: str = "local", rounds: int = 2, **changes: Any) -> sf.Run:
    plan: Any = "independent" if shape == "local" else Sequential(hand_over="none")
    arguments: dict[str, Any] = {
        "schedule": plan,
        "method": FedProto(),
        "logging": sf.Logging(record=Recording((FED,))),
        **changes,
    }
    return sf.train(
        shaped(shape), data(), rounds=rounds, evaluation=sf.Evaluation(every=rounds), defenses=guards, **arguments
    )


def ready(*guards: Defense, shape: str = "local") -> Any:
    plan: Any = "independent" if shape == "local" else Sequential(hand_over="none")
    return prepare(
        shaped(shape), data(), schedule=plan, defenses=guards, optimizer=None, training=Training(64), method=FedProto()
    )


def sent(run: sf.Run, kind: str = "prototype", replica: int = 0) -> list[Mapping[str, Tensor]]:
    return [
        m.tensors
        for m in run.engine.view(FED).messages
        if (m.kind, m.receiver, m.stamp.replica) == (kind, FED, replica)
    ]


def test_the_place_is_named_after_the_fed_server() -> None:
    assert f"->{FED}" == UPLOAD
    assert Noise(on=("prototype->fed_server", "bottom->top")).uploads == ("prototype",)


def test_rows_of_vectors_matrices_and_what_is_left_alone() -> None:
    assert rows_of(torch.zeros(3)).shape == (1, 3)  # type: ignore[union-attr]
    assert rows_of(torch.zeros(4, 3)).shape == (4, 3)  # type: ignore[union-attr]
    assert rows_of(torch.tensor(1.0)) is None
    assert rows_of(torch.zeros(3, dtype=torch.int64)) is None


def test_a_row_is_clipped_and_whole_numbers_cross_as_they_are() -> None:
    """(3, 4) has length 5: clipped to 1 it is (.6, .8); with next to no noise that is what arrives."""
    quiet = GaussianRelease(clip=1.0, noise_multiplier=1e-9, on=AT)
    tensors = {"3": torch.tensor([3.0, 4.0]), "3/rows": torch.tensor(7), "two": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}
    message = apply_upload_defenses(Sent("prototype", tensors, "client0", 0, 5), [Keeper(0, quiet)], seed=0)
    assert message.tensors["3"].tolist() == pytest.approx([0.6, 0.8], abs=1e-6)
    assert message.tensors["two"].flatten().tolist() == pytest.approx([0.6, 0.8, 0.3, 0.4], abs=1e-6)
    assert message.tensors["3/rows"] is tensors["3/rows"]
    assert (message.sender, message.receiver, message.edge) == ("client0", FED, "prototype->fed_server")
    assert message.packed is None


def test_packed_bytes_by_hand() -> None:
    """Four bits for each of ten numbers are 5 bytes, and 8 for the range; a count of 8 bytes crosses as it is."""
    tensors = {"3": torch.linspace(0, 1, 10), "3/rows": torch.tensor(7)}
    keeper = Keeper(0, Quantization(bits=4, on=AT))
    assert size(Sent("prototype", tensors, "client0", 0, 0), [keeper]) == 5 + 8 + 8
    assert size(Sent("prototype", tensors, "client0", 0, 0), []) is None


@pytest.mark.parametrize("shape", ["local", "vanilla"])
def test_planned_is_counted_in_bytes_and_in_uses(shape: str) -> None:
    guards = (PRIVATE, Quantization(bits=4, on=AT))
    run, plan = go(*guards, shape=shape), ready(*guards, shape=shape)
    counted = {flow: found for flow, found in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert cost(plan, 2).flows == counted
    assert run.engine.traffic.bytes(kind="prototype") < go(PRIVATE, shape=shape).engine.traffic.bytes(kind="prototype")
    assert run.ledger.as_dict() == planned_ledger(plan, 2, 2).as_dict()


def test_epsilon_of_whole_models_by_hand() -> None:
    """Every class mean a client has sent is one use; the costliest client's add up, and nobody else's."""
    run = go(PRIVATE)
    uses = max(sum(sum(name.isdecimal() for name in m) for m in sent(run, replica=replica)) for replica in range(3))
    event = Event(Gaussian(2.0), Protects.MESSAGES, neighbours=Neighbours.SAME_CLASS)
    (total,) = run.ledger.totals
    assert total.epsilon == pytest.approx(compose([(event, uses)], run.ledger.delta).epsilon)
    assert (total.protects, total.neighbours) == (str(event.protects), str(event.neighbours))
    assert list(run.ledger.open) == ["names, whole numbers and single numbers in messages of prototype"]
    assert "learn from private rows" in total.note


def test_where_segments_are_shared_all_clients_uses_add_up() -> None:
    run = go(PRIVATE, shape="vanilla")
    uses = sum(sum(name.isdecimal() for name in m) for replica in range(3) for m in sent(run, replica=replica))
    (total,) = run.ledger.totals
    event = Event(Gaussian(2.0), Protects.MESSAGES, neighbours=Neighbours.SAME_CLASS)
    assert total.epsilon == pytest.approx(compose([(event, uses)], run.ledger.delta).epsilon)
    assert any(said.startswith("releases on bottom->top") for said in run.ledger.open)


@pytest.mark.parametrize("guard", [Noise(scale=1.0, on=AT), Quantization(bits=4, on=AT)])
def test_what_establishes_no_sensitivity_promises_nothing(guard: Defense) -> None:
    run = go(guard)
    assert run.ledger.totals == ()
    assert "prototype that FedProto sends" in run.ledger.open
    assert run.epsilon is None


@pytest.mark.parametrize("guard", [PRIVATE, LaplaceRelease(clip=1.0, epsilon=1.0, on=AT)])
def test_another_row_of_the_class_moves_no_mean_by_more_than_the_sensitivity(guard: Any) -> None:
    """Whatever a client's rows are, what is noised lies within `clip` of 0, so two of them differ by twice that."""
    order = 2 if isinstance(guard, GaussianRelease) else 1
    for scale in (1e-3, 1.0, 1e6):
        one, other = (
            guard.expected("3", scale * torch.randn(1, 20, generator=torch.Generator().manual_seed(s)), None)
            for s in (0, 1)
        )
        assert float(torch.linalg.vector_norm(one - other, ord=order)) <= 2 * guard.clip * (1 + 1e-6)


def test_no_noise_is_drawn_twice() -> None:
    run = go(Noise(scale=1.0, on=("note->fed_server",)), method=Twice())
    found = [m["a"] for replica in range(3) for m in sent(run, "note", replica)]
    assert len(found) == 2 * 2 * 3
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert all(int(m["b"]) == 4 for m in sent(run, "note"))
    again = go(Noise(scale=1.0, on=("note->fed_server",)), method=Twice())
    assert torch.equal(sent(again, "note")[3]["a"], sent(run, "note")[3]["a"])


def test_a_guarded_run_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    def stop(done: int, rounds: int, metrics: Any) -> None:
        if done == 1:
            raise KeyboardInterrupt

    whole = go(PRIVATE, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        go(PRIVATE, rounds=3, logging=sf.Logging(folder=tmp_path / "run", progress=stop))
    again = go(PRIVATE, rounds=3, logging=sf.Logging(folder=tmp_path / "run", resume=True))
    assert_same(whole.method_state["prototypes"], again.method_state["prototypes"])
    assert whole.ledger.as_dict() == again.ledger.as_dict()


def test_only_the_clients_that_have_it_are_guarded() -> None:
    run, bare = go(Noise(scale=10.0, on=AT, clients=(1,)), rounds=1), go(rounds=1)
    for replica in range(3):
        one, other = sent(run, replica=replica)[0], sent(bare, replica=replica)[0]
        name = next(name for name in one if name.isdecimal())
        assert torch.equal(one[name], other[name]) == (replica != 1)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Noise(on=("protoype->fed_server",)), {}, "unknown message for Noise: 'protoype->fed_server'; did you mean 'proto"),
    (
        Noise(on=AT),
        {"method": None},
        "Noise has nothing to protect at 'prototype->fed_server': the run has no federated",
    ),
    (
        Noise(on=("weights->fed_server",)),
        {"method": "fedavg"},
        "Noise cannot protect 'weights->fed_server': trained weights are made private by dp_sgd alone",
    ),
    (DistanceCorrelation(on=AT), {}, "DistanceCorrelation cannot guard 'prototype->fed_server': it acts on edges of"),
    (
        GaussianRelease(noise_multiplier=1.0, freeze=True, on=AT),
        {},
        "GaussianRelease freeze=True is not allowed here: it freezes the segments before an edge",
    ),
    (Noise(on=(*AT, "body->tail")), {}, "unknown edge 'body->tail'"),
]


@pytest.mark.parametrize(("guard", "changes", "text"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_guard_is_refused_before_training(guard: Defense, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        go(guard, **changes)
    assert str(error.value).startswith(text)


STUDY: dict[str, Any] = {
    "data": {"name": "digits", "victims": 8, "auxiliary": 32, "clients": 3, "dirichlet": 0.5},
    "training": {"rounds": 2, "batch_size": 64, "schedule": "independent", "record": {"parties": ["fed_server"]}},
    "topology": [{"name": "local", "cuts": ["relu1"]}],
    "method": [{"name": "fedproto"}],
    "defense": [
        {"name": "none"},
        {"name": "gaussian_release", "noise_multiplier": 2.0, "on": list(AT)},
    ],
    "attack": [{"name": "class_shares"}, {"name": "prototype_inversion", "iterations": 5}],
}


@pytest.mark.exhaustive
def test_from_study_to_report(tmp_path: Path) -> None:
    assert main(["run", str(write(tmp_path, small(**STUDY))), "--folder", str(tmp_path / "out")]) == 0
    found = {
        one["defense"]["name"]: one
        for one in (json.loads(p.read_text("utf-8")) for p in (tmp_path / "out" / "runs").glob("*/result.json"))
    }
    for one in found.values():
        shares, inversion = one["attacks"]
        assert (shares["adversary"], shares["target"]) == (FED, "shares")
        # The numbers of rows by class cross as they are, guarded or not.
        assert shares["scores"]["total_variation"]["attack"]["mean"] == pytest.approx(0.0, abs=1e-12)
        assert inversion["target"] == "representatives"
        assert one["bytes_by_kind"] == one["predicted"]["bytes_by_kind"]
        fed = next(party for party in one["parties"] if party["role"] == FED)
        assert [(e["kind"], e["from"]) for e in fed["receives"]] == [("prototype", "client")]
        assert ("gaussian_release" in fed["receives"][0]["guard"]) == (one["defense"]["name"] != "none")
    private = found["gaussian_release"]["privacy"]
    assert private["ledger"] == private["planned"]
    assert math.isfinite(private["ledger"]["totals"][0]["epsilon"])
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "how much of each of 10 classes a client holds" in page


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"defense": [{"name": "noise", "on": ["prototyp->fed_server"]}]},
            "study.toml: defense[0]: unknown message for Noise: 'prototyp->fed_server'; did you mean 'prototype->fed",
        ),
        (
            {"method": [{"name": "fedavg"}], "topology": [{"name": "local"}], "defense": None},
            "study.toml: attack[0]: class_shares: ClassShares reads prototype, label counts, soft labels; clients of",
        ),
        (
            {"method": None, "training": {**STUDY["training"], "schedule": "splitfed_v1"}, "defense": None},
            "study.toml: attack[0]: class_shares: ClassShares needs what the clients of a federated method send; only",
        ),
        (
            {"training": {"rounds": 1, "schedule": "independent"}, "defense": None},
            "study.toml: attack[0]: class_shares goes against recorded training; record it: [training.record] parties",
        ),
    ],
    ids=["kind", "nothing to read", "no method", "no record"],
)
def test_a_study_is_refused_in_lines_with_their_place(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        checked(small(**{**STUDY, **changes}))
    assert str(error.value).splitlines()[0].startswith(text)
