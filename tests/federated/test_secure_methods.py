"""Prototypes and soft labels through secure sums: as without to precision, planned bytes, resume, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.encryption import EncryptedSum
from splitfed.engines.base import FED
from splitfed.federated import MAFML, FedDistill, FedMD, FedProto
from splitfed.federated.class_sums import MEANS, WEIGHTS, class_sums, class_upload
from splitfed.federated.feddistill import Follow
from splitfed.schedules import Independent, SplitFedV1
from splitfed.secure_sum import SecureSum
from splitfed.topologies import vanilla
from tests.federated.methods import assert_plan_is_counted, assert_resumes, data, go, net, planned

KINDS = ("masks", "ckks")
OF_SUMS = {"keys", "shares", "survivors", "masked", "unmasking"}
OF_SUMS |= {"public context", "encrypted weight", "total weight", "encrypted", "mean"}


def shown() -> Any:
    return sf.data.digits().rows(range(120)).clients(3, auxiliary=4, victims=4, public=0.1)


def head() -> Any:
    return vanilla(net(), "relu1").with_task(sf.classification(10)).heads[0]


def test_an_upload_has_a_row_for_every_class_and_zeros_for_those_not_held() -> None:
    found = class_upload({"1": torch.tensor([4.0, 8.0]), "3": torch.tensor([1.0, 0.0])}, {"1": 0.75, "3": 0.25}, head())
    assert found[MEANS].shape == (10, 2)
    assert found[MEANS][[1, 3]].tolist() == [[3.0, 6.0], [0.25, 0.0]]
    assert found[WEIGHTS].tolist() == [0, 0.75, 0, 0.25, 0, 0, 0, 0, 0, 0]
    rows, weights = class_sums(found)
    assert (list(rows), weights) == (["1", "3"], {"1": 0.75, "3": 0.25})


@pytest.mark.parametrize("secure", KINDS)
@pytest.mark.parametrize("weighted", [True, False])
def test_summed_prototypes_are_the_plain_ones_to_precision(secure: str, weighted: bool) -> None:
    """The first round trains alike. A sum's error is divided by the share of the class, and again rounded once."""
    rows = data()
    plain, summed = (
        go("local", FedProto(secure=given, weighted=weighted), 1, data=rows).method_state["prototypes"]
        for given in (False, secure)
    )
    assert list(plain) == list(summed)
    assert len(plain) > 5
    labels = torch.cat([client.train.y for client in rows.clients])
    error = EncryptedSum().precision(3) if secure == "ckks" else 2.0**-24
    for name, row in plain.items():
        share = float((labels == int(name)).double().mean()) if weighted else 1 / 3
        largest = 2 * error * (1 + float(row.abs().max())) / share
        assert torch.allclose(row.double(), summed[name].double(), rtol=2**-22, atol=largest), name


@pytest.mark.parametrize("secure", KINDS)
def test_the_server_gets_no_prototypes_of_a_client(secure: str) -> None:
    run = go("local", FedProto(secure=secure), 1, logging=sf.Logging(record=Recording((FED,))))
    received = {m.kind for m in run.engine.view(FED).messages if m.receiver == FED}
    assert received
    assert received <= OF_SUMS
    for attack in ("prototype_inversion", "class_shares"):
        with pytest.raises(InvalidInput, match=r"reads .*prototype.*; clients of FedProto send "):
            run.attack(attack, adversary=FED)


@pytest.mark.parametrize(
    ("shape", "method", "schedule"),
    [
        ("local", FedProto(secure="ckks"), Independent(clients_per_round=3, drop_out=0.3)),
        ("local", FedProto(secure="masks", weighted=False), Independent(clients_per_round=3, drop_out=0.3)),
        pytest.param(
            "vanilla", FedProto(secure="ckks"), SplitFedV1(secure="ckks"), marks=pytest.mark.exhaustive, id="both"
        ),
        ("vanilla", FedProto(secure=SecureSum(bits=20)), SplitFedV1(secure="ckks", drop_out=0.2)),
        ("local", FedDistill(secure="ckks"), Independent(clients_per_round=3, drop_out=0.3)),
        ("local", FedDistill(secure=True), Independent(clients_per_round=3, drop_out=0.3)),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_planned_bytes_are_counted_bytes(shape: str, method: Any, schedule: Any) -> None:
    rows = data(4, 200)
    run = assert_plan_is_counted(shape, method, 4, data=rows, schedule=schedule)
    # Nothing of the method is read by the server, and what comes of it is handed out.
    sent = {flow.kind for flow in run.engine.traffic.flows if flow.receiver == FED and flow.phase == "train"}
    assert sent <= OF_SUMS
    assert {"prototype", "soft labels"} & set(run.engine.traffic.by_kind())


@pytest.mark.parametrize("secure", KINDS)
def test_planned_bytes_of_fedmd_are_counted_bytes(secure: str) -> None:
    run = assert_plan_is_counted("local", FedMD(rows=12, batch=5, secure=secure), data=shown())
    sent = {flow.kind for flow in run.engine.traffic.flows if flow.receiver == FED and flow.phase == "train"}
    # Public rows are shown to everybody, by way of the server.
    assert sent - OF_SUMS == {"data"}


@pytest.mark.parametrize("secure", KINDS)
def test_fedmd_follows_the_plain_mean(secure: str) -> None:
    """Goals differ by 2^-25 and a rounding, which steps of a rate of .05 on the mean carry into the weights."""
    rows, goals = shown(), []
    for given in (False, secure):
        run = go("local", FedMD(batch=40, secure=given, distance="kl"), 2, data=rows, batch_size=40)
        goals.append({f"{i}/{n}": w for i in range(3) for n, w in run.engine.modules(i)["body"].state_dict().items()})
    assert all(torch.allclose(goals[0][name], goals[1][name], atol=1e-5) for name in goals[0])


@pytest.mark.parametrize("secure", KINDS)
def test_feddistill_takes_its_own_scores_out_itself(secure: str) -> None:
    """What a client follows in the second round is the plain mean of the others."""
    rows = data()
    followed = []
    for given in (False, secure):
        run = go("local", FedDistill(secure=given), 2, data=rows)
        objectives = [run.learners[i].objectives["client"] for i in range(3)]
        assert all(isinstance(objective, Follow) for objective in objectives)
        followed.append([objective.means[i] for i, objective in enumerate(objectives)])  # type: ignore[attr-defined]
    for plain, summed in zip(*followed, strict=True):
        assert list(plain) == list(summed)
        assert plain
        for name, scores in plain.items():
            torch.testing.assert_close(scores, summed[name], rtol=1e-5, atol=1e-5)


def test_a_client_takes_out_what_is_in_the_sum_and_nothing_else() -> None:
    """A sum of round 2 holds what the client sent in round 2: 7 - 4 from one other; what it sent later is in none."""
    objective = Follow(1.0, "head", "out", 3)
    sums = {"0": torch.tensor([7.0]), "0/clients": torch.tensor(2), "2": torch.tensor([5.0])}
    sums |= {"2/clients": torch.tensor(1), "round": torch.tensor(2)}
    objective.own, objective.told = {"0": torch.tensor([4.0]), "2": torch.tensor([5.0])}, 2
    assert {name: row.tolist() for name, row in objective.others(sums).items()} == {"0": [3.0]}
    objective.told = 1
    assert {name: row.tolist() for name, row in objective.others(sums).items()} == {"0": [3.5], "2": [5.0]}


@pytest.mark.parametrize(
    "method",
    [pytest.param(FedProto(secure="ckks"), marks=pytest.mark.exhaustive), FedDistill(secure="ckks")],
    ids=lambda one: type(one).__name__,
)
def test_resumed_run_ends_in_the_same_bits(method: Any, tmp_path: Path) -> None:
    assert_resumes("local", method, tmp_path, data=data(3, 90))


def test_two_sums_of_a_round_share_no_masks() -> None:
    """Else the difference of a client's two masked uploads would be that of what it masked."""
    method, schedule = FedProto(secure="masks"), SplitFedV1(secure="masks")
    run = go("vanilla", method, 1, schedule=schedule, logging=sf.Logging(record=Recording((FED,))))
    sent = [m for m in run.engine.view(FED).messages if m.kind == "keys"]
    rows = [m.tensors["keys"].numpy().tobytes() for m in sent]
    assert len(rows) == 2 * 3
    assert len(set(rows)) == len(rows)


def test_too_few_survivors_sum_no_prototypes() -> None:
    run = go("local", FedProto(secure="ckks"), 8, data=data(3, 90), schedule=Independent(drop_out=0.6))
    averaged = [record["dropped"] for record in run.history]
    assert run.engine.traffic.bytes(kind="mean") > 0
    uploads = sum(
        n for flow, (n, _) in run.engine.traffic.flows.items() if flow.kind == "encrypted" and flow.receiver == FED
    )
    assert uploads == sum(3 - len(gone) for gone in averaged if len(gone) <= 1)


@pytest.mark.parametrize(
    ("shape", "method", "changes", "text"),
    [
        (
            "vanilla",
            FedProto(),
            {"schedule": SplitFedV1(secure="ckks")},
            "not the other messages of method FedProto: give the method secure as well$",
        ),
        (
            "vanilla",
            MAFML(),
            {"schedule": SplitFedV1(secure="ckks")},
            "not the other messages of method MAFML: leave one of them out$",
        ),
        ("local", FedProto(secure="ckks"), {"data": data(1)}, "^a secure sum of 1 upload is that upload"),
        (
            "local",
            FedDistill(secure={"threshold": 4}),
            {},
            "^secure threshold=4 is not allowed; 3 clients take part in a round$",
        ),
        (
            "vanilla",
            FedMD(secure="ckks"),
            {"data": shown(), "schedule": sf.schedules.Sequential(hand_over="none")},
            "^fedmd secure sums what clients send; in topology 'vanilla' 'server' makes all scores$",
        ),
    ],
)
def test_what_is_not_summed_is_refused(shape: str, method: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        planned(shape, method, 1, **changes)


def test_losses_and_unknown_sums_are_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"^fedproto further=1 reads every client's loss, which secure hides: take one$"
    ):
        FedProto(further=1, secure="ckks")
    for method in (FedProto, FedMD, FedDistill):
        with pytest.raises(InvalidInput, match=r"^secure='ckk' is not allowed; expected true, false, 'masks', 'ckks'"):
            method(secure="ckk")


def test_embeddings_beyond_the_limit_are_refused_by_the_client() -> None:
    with pytest.raises(InvalidInput, match=r"client0's 'prototype: means' reaches .*, beyond the declared 0\.001"):
        go("local", FedProto(secure={"name": "ckks", "limit": 0.001}), 1)
