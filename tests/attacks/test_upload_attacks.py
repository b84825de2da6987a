"""Attacks on what clients of a federated method send: what they read, worked out by hand, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import splitfed as sf
from splitfed.attacks.base import Attack, Knowledge
from splitfed.attacks.scoring.share_metrics import score_shares
from splitfed.attacks.uploads.class_shares import ClassShares
from splitfed.attacks.uploads.prototype_inversion import PrototypeInversion
from splitfed.attacks.uploads.prototype_membership import PrototypeMembership
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.data.candidates import candidates
from splitfed.engines.base import FED
from splitfed.federated import FedDistill, FedProto
from splitfed.threats.segment_runner import SegmentRunner
from tests.attacks.examples import fed_run, perceptron, proto_run
from tests.rounding import single

CLASSES = 4


def seen(*messages: tuple[str, Mapping[str, Tensor]], sender: str = "client0") -> View:
    """The view of an aggregation server that got these (kind, tensors), one a round, and sent the first one on."""
    made = [
        Message(sender, FED, kind, f"{kind}->{FED}", tensors, Stamp("train", 0, i, 0))
        for i, (kind, tensors) in enumerate(messages)
    ]
    return View(FED, (*made, made[0]._replace(sender=FED, receiver="client0")))


def guessed(attack: Attack, view: View, **known: Any) -> Tensor:
    knowledge = Knowledge((2,), classes=CLASSES, **known)
    return attack(view, knowledge, torch.Generator().manual_seed(0)).prediction


V = torch.ones(3)
READ: list[tuple[tuple[str, Mapping[str, Tensor]], list[float]]] = [
    # Numbers of rows beside means: 6 of class 1, 2 of class 3.
    (("prototype", {"1": V, "3": V, "1/rows": torch.tensor(6), "3/rows": torch.tensor(2)}), [0, 0.75, 0, 0.25]),
    # A histogram.
    (("label counts", {"rows": torch.tensor([1, 1, 0, 2])}), [0.25, 0.25, 0, 0.5]),
    # Names alone.
    (("soft labels", {"0": V, "2": V}), [0.5, 0, 0.5, 0]),
    # Probabilities of two public rows, and scores, whose softmax is even here.
    (("soft labels", {"probabilities": torch.tensor([[1.0, 0, 0, 0], [0, 0.5, 0.5, 0]])}), [0.5, 0.25, 0.25, 0]),
    (("soft labels", {"scores": torch.full((2, 4), 7.0)}), [0.25] * 4),
]


@pytest.mark.parametrize(("message", "shares"), READ, ids=range(len(READ)))
def test_class_shares_reads_the_plainest_of_what_was_sent(
    message: tuple[str, Mapping[str, Tensor]], shares: list[float]
) -> None:
    assert guessed(ClassShares(), seen(message)).tolist() == single(shares)


def test_the_newest_message_counts_and_the_plainest_kind_first() -> None:
    view = seen(("soft labels", {"1": V}), ("soft labels", {"0": V}))
    assert guessed(ClassShares(), view).tolist() == [1, 0, 0, 0]
    both = seen(("soft labels", {"0": V}), ("label counts", {"rows": torch.tensor([0, 3, 0, 1])}))
    assert guessed(ClassShares(), both).tolist() == [0, 0.75, 0, 0.25]
    with pytest.raises(
        InvalidInput, match="class_shares found no counts, names or scores of classes among the client's messages to"
    ):
        guessed(ClassShares(), seen(("prototype", {"bias": V})))


def test_score_of_shares_by_hand() -> None:
    # Half of the rows are of class 0, half of class 1, of three classes.
    truth, scores = score_shares(torch.tensor([0, 1, 0, 1]), torch.tensor([3.0, 0.0, 1.0]), torch.tensor([2, 2, 0, 0]))
    assert truth.tolist() == [0.5, 0.5, 0.0]
    # Guess .75, 0, .25: |.25| + |.5| + |.25| = 1, half of it; of the two that are there one lies above, one below.
    assert scores["attack"]["total_variation"].mean == pytest.approx(0.5)
    assert scores["attack"]["auc"].mean == 0.5
    # Prior .5, 0, .5: 0 + .5 + .5; even shares: 1/6 + 1/6 + 1/3.
    assert scores["prior"]["total_variation"].mean == pytest.approx(0.5)
    assert scores["uniform"]["total_variation"].mean == pytest.approx(1 / 3)
    assert scores["prior"]["auc"].mean == scores["uniform"]["auc"].mean == 0.5
    perfect = score_shares(torch.tensor([0, 1]), torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0]))[1]["attack"]
    assert (perfect["total_variation"].mean, perfect["auc"].mean) == (0.0, 1.0)
    assert "auc" not in score_shares(torch.tensor([0, 1]), torch.ones(2), torch.tensor([0]))[1]["attack"]
    for wrong in (torch.tensor([-1.0, 2.0]), torch.zeros(2), torch.tensor([float("nan"), 1.0]), torch.ones(2, 2)):
        with pytest.raises(InvalidInput, match="prediction has no valid shares"):
            score_shares(torch.tensor([0, 1]), wrong, torch.tensor([0]))
    with pytest.raises(InvalidInput, match="prediction has shares of 2 classes, which the client's labels are"):
        score_shares(torch.tensor([2]), torch.ones(2), torch.tensor([0]))


def identity(x: Tensor) -> dict[str, Tensor]:
    return {"prototype": x}


def test_membership_is_the_distance_from_the_mean_of_the_class() -> None:
    view = seen(("prototype", {"0": torch.tensor([0.0, 0.0]), "3": torch.tensor([5.0, 5.0])}))
    rows = torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0], [1.0, 1.0]])
    labels = torch.tensor([0, 3, 3, 2])
    found = guessed(PrototypeMembership(), view, extractor=identity, candidates=rows, candidate_labels=labels)
    # 3^2 + 4^2; 0 + 1; 5^2 + 4^2; of class 2 no mean was sent: further than all.
    assert found[:3].tolist() == [-25.0, -1.0, -41.0]
    assert float(found[3]) < -61.0


def test_inversion_starts_near_auxiliary_rows_and_fits_the_mean() -> None:
    view = seen(("prototype", {"1": torch.tensor([0.9, 0.1])}))
    known = torch.tensor([[1.0, 0.0], [0.8, 0.0], [0.0, 1.0]])
    attack = PrototypeInversion(iterations=400, neighbours=2, stay=0.0)
    found = guessed(attack, view, extractor=identity, auxiliary=known)
    assert found[1].tolist() == pytest.approx([0.9, 0.1], abs=1e-2)
    # Classes that were not sent: the mean of all auxiliary rows.
    assert found[0].tolist() == found[2].tolist() == single([0.6, 1 / 3])
    near = guessed(PrototypeInversion(iterations=1, lr=1e-9, neighbours=2), view, extractor=identity, auxiliary=known)
    assert near[1].tolist() == single([0.9, 0.0])


@pytest.mark.parametrize("method", [FedProto(weight=1.0), FedDistill()])
def test_the_extractor_is_what_the_client_sent_means_of(method: Any) -> None:
    run = proto_run(method=method)
    topology, client = run.engine.topologies[2], run.data.clients[2].train
    means = run.method.traits(topology).class_means  # type: ignore[union-attr]
    facts, modules, (name,) = run.engine.all_facts[2], run.engine.modules(2), topology.inputs
    extractor = SegmentRunner(topology, facts, modules, lambda x: {name: x}, values=means)
    ((kind, z),) = extractor(client.x).items()
    newest = [m for m in run.engine.view(FED).messages if (m.kind, m.receiver, m.stamp.replica) == (kind, FED, 2)][-1]
    for label in client.y.unique().tolist():
        assert torch.allclose(newest.tensors[str(label)], z[client.y == label].mean(0), atol=1e-5)


def test_candidates_of_one_client_are_of_its_classes_alone() -> None:
    data = proto_run().data
    rows, members = candidates(data, data.victims, torch.Generator().manual_seed(0), client=1)
    held = set(data.clients[1].train.y.tolist())
    assert set(rows.y.tolist()) <= held
    # As many of each class on both sides: the class of a row does not tell who it is.
    inside, outside = (torch.bincount(rows.y[side], minlength=10) for side in (members, ~members))
    assert torch.equal(inside, outside)
    sides = (data.clients[1].train.y, data.victims.y)
    assert inside.tolist() == torch.stack([torch.bincount(y, minlength=10) for y in sides]).amin(0).tolist()
    known = {row.numpy().tobytes() for row in data.clients[1].train.x}
    assert [row.numpy().tobytes() in known for row in rows.x] == members.tolist()


def test_soft_labels_are_attacked_like_prototypes() -> None:
    run = proto_run(method=FedDistill())
    shares, inversion = run.attack(["class_shares", "prototype_inversion"])
    assert shares.scores["attack"]["auc"].mean == 1.0
    assert inversion.scores["attack"]["psnr"].mean > inversion.scores["mean_image"]["psnr"].mean + 5


def test_what_grants_nothing_is_refused() -> None:
    run = proto_run()
    with pytest.raises(InvalidInput, match="ClassShares needs what the clients of a federated method send; only"):
        run.attack("class_shares", adversary="client0")
    with pytest.raises(InvalidInput, match="leave victims out"):
        run.attack("class_shares", victims=run.data.victims)
    with pytest.raises(InvalidInput, match="ClassShares needs what the clients of a federated method send; only"):
        fed_run(perceptron).attack("class_shares", adversary=FED)
    unrecorded = sf.train(
        run.engine.topologies[0], run.data, schedule="independent", method=FedProto(), rounds=1, batch_size=200
    )
    with pytest.raises(InvalidInput, match="'fed_server' was not recorded in training"):
        unrecorded.attack("prototype_inversion", adversary=FED)
    averaged = fed_run(perceptron, schedule="independent", method="fedavg")
    with pytest.raises(InvalidInput, match="PrototypeInversion reads prototype, soft labels; clients of FedAvg"):
        averaged.attack("prototype_inversion", adversary=FED)
    found = run.evaluator.applicable(FED)
    assert found["class_shares"] is found["prototype_inversion"] is found["prototype_membership"] is None
    assert found["dlg"] is not None
