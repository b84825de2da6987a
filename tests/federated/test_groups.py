"""Federations of groups: each a replica whose rows several parties share, averaged role by role."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.attacks.gradients.dlg import Dlg
from splitfed.attacks.gradients.gradient_matching import client_gradient
from splitfed.attacks.uploads.upload_membership import UploadMembership
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.engines.base import FED
from splitfed.federated import FML, PFedMe
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.registry import load
from splitfed.schedules import Sequential
from splitfed.schedules.base import Training
from splitfed.threats.exchanged_models import exchanged_rounds
from splitfed.threats.recorded_training import recorded_view
from splitfed.topologies import extended_vanilla, local, multi_task, vertical
from tests.federated.methods import assert_equal, assert_nothing_held_twice, counted
from tests.thinning import thin

RATE = 0.1
ALONE = Sequential(hand_over="none")
METHODS = (
    "fedavg",
    "fedprox",
    "scaffold",
    "fednova",
    "fedsgd",
    "pfedme",
    "ditto",
    "apfl",
    "fedproto",
    "fml",
    "feddistill",
)


def made(name: str) -> Any:
    return PFedMe(weight=2.0, steps=2) if name == "pfedme" else load("methods", name)()


@cache
def data() -> Any:
    rows = sf.data.breast_cancer().vertical({"left": range(15), "right": range(15, 30)})
    return rows.clients(3, auxiliary=0, victims=0, validation=0.0, test=0.3, seed=0)


def bottoms() -> dict[str, nn.Module]:
    return {role: nn.Sequential(nn.Linear(15, 8), nn.ReLU()) for role in ("left", "right")}


def hospital_and_laboratory() -> Topology:
    """All parties are the group's own, the one with the labels among them."""
    return vertical(bottoms(), nn.Sequential(nn.Linear(16, 1)), labels="server")


SHAPES: dict[str, tuple[Callable[[], Topology], Any]] = {
    "own server": (hospital_and_laboratory, "independent"),
    "one server": (lambda: vertical(bottoms(), nn.Linear(16, 1), labels="right"), ALONE),
    "averaged server": (lambda: vertical(bottoms(), nn.Linear(16, 1), labels="right"), "splitfed_v3"),
    "extended": (
        lambda: extended_vanilla(bottoms(), nn.Linear(16, 8), nn.Linear(8, 1), labels="right"),
        ALONE,
    ),
    "multi-task": (
        lambda: multi_task(
            bottoms(),
            {"ward": nn.Linear(16, 1), "registry": nn.Linear(16, 1)},
            targets={"ward": None, "registry": None},
            labels={"ward": "right", "registry": "left"},
        ),
        ALONE,
    ),
}
# FedProto needs an embedding where the labels are; FedDistill one head.
LEFT_OUT = (("fedproto", "own server"), ("feddistill", "multi-task"))
PAIRS = [(name, shape) for name in METHODS for shape in SHAPES if (name, shape) not in LEFT_OUT]


@cache
def built(shape: str) -> Topology:
    with stream(0):
        return SHAPES[shape][0]()


def go(shape: str, method: Any, rounds: int = 3, **changes: Any) -> sf.Run:
    changes.setdefault("schedule", SHAPES[shape][1])
    changes.setdefault("batch_size", 16)
    changes.setdefault("optimizer", Optim("SGD", {"lr": RATE}))
    return sf.train(built(shape), data(), method=method, rounds=rounds, **changes)


@pytest.mark.parametrize(("name", "shape"), thin(PAIRS, 3))
def test_groups_learn_plans_are_counted_and_runs_resumed(name: str, shape: str, tmp_path: Path) -> None:
    def stop(done: int, rounds: int, metrics: Any) -> None:
        if done == 2:
            raise KeyboardInterrupt

    run = go(shape, made(name), 6)
    # .63 is the share of the more frequent class.
    assert run.history[-1]["test"]["union"] > 0.7
    assert_nothing_held_twice(run)
    ready = prepare(
        built(shape),
        data(),
        schedule=SHAPES[shape][1],
        defenses=(),
        optimizer=Optim("SGD", {"lr": RATE}),
        training=Training(16),
        method=made(name),
    )
    assert cost(ready, 6).flows == counted(run)
    with pytest.raises(KeyboardInterrupt):
        go(shape, made(name), 6, logging=sf.Logging(folder=tmp_path / "run", progress=stop))
    again = go(shape, made(name), 6, logging=sf.Logging(folder=tmp_path / "run", resume=True))
    assert_equal(run.method_state, again.method_state)
    for replica in range(3):
        for segment, module in run.engine.modules(replica).items():
            assert_equal(module.state_dict(), again.engine.modules(replica)[segment].state_dict())


class Whole(nn.Module):
    """The model of a group as one module."""

    def __init__(self, pieces: dict[str, nn.Module]) -> None:
        super().__init__()
        self.left, self.right, self.top = pieces["left"], pieces["right"], pieces["server"]

    def forward(self, x: Tensor) -> Any:
        return self.top(torch.cat([self.left(x[:, :15]), self.right(x[:, 15:])], 1))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "pfedme", "ditto", "fedsgd"])
def test_groups_whose_parties_are_all_their_own_learn_as_whole_models_do(name: str) -> None:
    """What is averaged role by role is what is averaged of one model that holds all pieces."""
    run = go("own server", made(name))
    segments = {s.name: s for s in built("own server").segments if any(True for _ in s.module.parameters())}
    with stream(0):
        topology = hospital_and_laboratory()
    whole = Whole({s.role: s.module for s in topology.segments if s.name in segments})
    rows = sf.data.breast_cancer().clients(3, auxiliary=0, victims=0, validation=0.0, test=0.3, seed=0)
    one = sf.train(
        local(whole, task=sf.binary()),
        rows,
        schedule="independent",
        method=made(name),
        rounds=3,
        batch_size=16,
        optimizer=Optim("SGD", {"lr": RATE}),
    )
    assert torch.equal(rows.clients[1].train.x, data().clients[1].train.x)
    for replica in range(3):
        (held,) = (m for n, m in one.engine.modules(replica).items() if not n.startswith("shared_"))
        for name_, segment in segments.items():
            part = getattr(held, {"left": "left", "right": "right", "server": "top"}[segment.role])
            for key, tensor in run.engine.modules(replica)[name_].state_dict().items():
                torch.testing.assert_close(tensor, part.state_dict()[key], rtol=1e-5, atol=1e-6)
    assert run.history[-1]["test"]["clients"] == one.history[-1]["test"]["clients"]


def test_a_party_sends_its_own_weights_and_is_sent_those_of_its_role() -> None:
    run = go("own server", "fedavg", 2, logging=sf.Logging(record=Recording((FED,))))
    ends = set()
    for message in (m for replica in range(3) for m in recorded_view(run.engine, FED, replica).messages):
        party = message.sender if message.receiver == FED else message.receiver
        held = {s.name for s in built("own server").segments_of(party.rstrip("0123456789"))}
        assert {name.partition("/")[0] for name in message.tensors} <= held
        ends.add((message.sender, message.receiver))
    assert len(ends) == 2 * 3 * 3


def test_methods_of_one_party_say_what_to_take_for_groups() -> None:
    text = "fedkd needs clients of one party .* the roles left, right, server share them: take fedavg or another"
    with pytest.raises(InvalidInput, match=text):
        go("own server", "fedkd")


def bernoulli_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean of KL(teacher || student) of two outputs before the sigmoid, with the teacher detached."""
    told, taught = teacher.detach().sigmoid(), student.sigmoid()
    return (told * (told / taught).log() + (1 - told) * ((1 - told) / (1 - taught)).log()).mean()


def test_the_memes_of_groups_teach_and_are_averaged_as_by_hand() -> None:
    """Three rounds of mutual learning, one step each, beside a loop that knows no parties."""
    run = go("own server", FML(alpha=0.7, beta=0.4), 3, batch_size=512)
    fitted, rows = run.engine.topology, [one.train for one in data().clients]
    places = {"left": "bottom_left", "right": "bottom_right", "server": "top"}

    def held(prefix: str) -> Whole:
        return Whole({role: copy.deepcopy(fitted.segment(prefix + name).module) for role, name in places.items()})

    groups = [(held(""), held("meme_")) for _ in rows]
    shares = [len(one) / sum(map(len, rows)) for one in rows]
    for _ in range(3):
        for (own, meme), one in zip(groups, rows, strict=True):
            scores, taught = own(one.x), meme(one.x)
            loss = torch.zeros(())
            for student, teacher, weight in ((scores, taught, 0.7), (taught, scores, 0.4)):
                itself = functional.binary_cross_entropy_with_logits(student.view(-1), one.y.float())
                loss = loss + weight * itself + (1 - weight) * bernoulli_divergence(student, teacher)
            moved = [*own.parameters(), *meme.parameters()]
            for parameter, slope in zip(moved, torch.autograd.grad(loss, moved), strict=True):
                parameter.data -= RATE * slope
        for weights in zip(*(meme.parameters() for _, meme in groups), strict=True):
            mean = sum(share * weight.data for share, weight in zip(shares, weights, strict=True))
            for weight in weights:
                weight.data = torch.as_tensor(mean).clone()
    averaged = {name: t for state in run.method_state.values() for name, t in state["meme"].items()}
    for replica, (own, meme) in enumerate(groups):
        modules = run.engine.modules(replica)
        for role, name in places.items():
            part = "top" if role == "server" else role
            for key, weight in getattr(own, part).state_dict().items():
                torch.testing.assert_close(modules[name].state_dict()[key], weight, rtol=1e-6, atol=1e-6)
            for key, weight in getattr(meme, part).state_dict().items():
                torch.testing.assert_close(averaged[f"meme_{name}/{key}"], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "apfl"])
def test_a_secure_sum_of_every_role_is_the_mean_of_its_parties(method: str) -> None:
    kind = load("methods", method)
    summed = go("own server", kind(aggregation={"secure": True}), 2)
    plain = go("own server", kind(), 2)
    for replica in range(3):
        for name, module in plain.engine.modules(replica).items():
            for key, tensor in module.state_dict().items():
                torch.testing.assert_close(
                    summed.engine.modules(replica)[name].state_dict()[key], tensor, rtol=1e-3, atol=1e-3
                )


@pytest.mark.parametrize("name", ["fedavg", "fedsgd"])
def test_attacks_on_uploads_read_what_all_parties_of_a_group_send(name: str) -> None:
    """The exchanged model of a round has the segments of every party, as they were sent and as they came back."""
    run = go("own server", name, 2, logging=sf.Logging(record=Recording((FED,))))
    (*_, newest) = exchanged_rounds(recorded_view(run.engine, FED, 0).messages, torch.device("cpu"))
    held = {f"{s.name}/{n}" for s in built("own server").segments for n in s.module.state_dict()}
    assert newest.before.keys() == newest.after.keys() == held
    assert all(not torch.equal(newest.before[n], newest.after[n]) for n in held)
    if name == "fedavg":
        own = {f"{s}/{n}": t for s, m in run.engine.modules(0).items() for n, t in m.state_dict().items()}
        assert all(torch.equal(newest.after[n], own[n]) for n in held)


@cache
def few_rows(count: int) -> Any:
    """Groups of `count` training rows each, of which one step a round is made."""
    rows = sf.data.breast_cancer().rows(range(40 + 6 * count)).vertical({"left": range(15), "right": range(15, 30)})
    return rows.clients(3, auxiliary=30, victims=10, validation=0.0, test=0.5, seed=0)


def stepped(shape: str, method: str, count: int = 3, **changes: Any) -> sf.Run:
    """Return a run of one round of one step, whose uploads the aggregation server recorded."""
    given: dict[str, Any] = {"schedule": SHAPES[shape][1], "optimizer": Optim("SGD", {"lr": RATE})} | changes
    with stream(0):
        # Smooth, as in the paper of the attack: the gradient's gradient guides its search.
        pieces: dict[str, nn.Module] = {r: nn.Sequential(nn.Linear(15, 12), nn.Tanh()) for r in ("left", "right")}
        topology = vertical(pieces, nn.Linear(24, 1), labels="server" if shape == "own server" else "right")
    log = sf.Logging(record=Recording((FED,)))
    return sf.train(topology, few_rows(count), method=method, rounds=1, batch_size=64, logging=log, **given)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("fedavg", "own server"), ("fedsgd", "own server"), ("ditto", "own server"), ("fedavg", "one server")],
)
def test_what_all_parties_of_a_group_send_is_the_gradient_of_their_rows(name: str, shape: str) -> None:
    """As the attacks work it out; what a server outside of the group returned is searched, here it is the true one."""
    run, train = stepped(shape, name), few_rows(3).clients[0].train
    (request,) = run.evaluator.requests([("dlg", Dlg())], FED)
    client = client_gradient(*run.evaluator.prepare_attack(request))
    # Twenty before a sigmoid is a label of one, minus twenty a label of zero.
    labels = {head.value: (40.0 * train.y.double() - 20.0).view(-1, 1) for head in client.local.heads}
    assert bool(labels) == (shape == "own server")
    modules = {s.name: copy.deepcopy(s.module).double() for s in run.engine.topology.segments}
    sides = zip(("left", "right"), train.x.double().split(15, 1), strict=True)
    made = {f"z_{role}": modules[f"bottom_{role}"](x).detach().requires_grad_() for role, x in sides}
    scores = modules["top"](torch.cat(list(made.values()), 1)).view(-1)
    loss = functional.binary_cross_entropy_with_logits(scores, train.y.double())
    back = dict(zip(made, torch.autograd.grad(loss, list(made.values())), strict=True)) if not labels else {}
    for found, seen in zip(client.gradient(train.x.double(), labels, back), client.target, strict=True):
        torch.testing.assert_close(found, seen, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fml"])
def test_a_row_of_a_group_is_inverted_from_its_uploads(name: str) -> None:
    """All columns, those of both parties; of FML the meme, whose labels are mixed with the private model's scores."""
    (found,) = stepped("own server", name, 1).attack(Dlg(iterations=60, restarts=1))
    assert found.scores["attack"]["mse"].mean < 0.01 * found.scores["random_pairing"]["mse"].mean


def test_features_of_a_group_are_those_that_all_its_parties_contribute_to() -> None:
    """Those joined at the server, which computes nothing with weights for it."""
    run = stepped("one server", "fedavg")
    (request,) = run.evaluator.requests([("upload_membership", UploadMembership())], FED)
    exchanged = run.evaluator.prepare_attack(request)[1].exchanged
    assert exchanged is not None
    assert not exchanged.scores
    assert {s.name for s in exchanged.segments} == {"bottom_left", "bottom_right", "fusion"}
    assert exchanged.out in run.engine.topology.segment("fusion").outputs


def test_attacks_on_the_updates_of_groups_say_what_they_cannot_follow() -> None:
    run = stepped(
        "own server", "fedavg", optimizer={"left": Optim("SGD", {"lr": 0.2}), "right": Optim("SGD", {"lr": RATE})}
    )
    text = "the parties 'left' and 'right' of a group train by steps of different kinds"
    assert text in str(run.applicable()["dlg"])
    assert text in str(run.applicable()["upload_lira"])
