"""Two runs that differ in private values alone: what crosses and changes is what the ledger says is open.

What a mechanism makes is replaced by something that depends on nothing, so that all that is under its promise stays the
same. Any message of a data owner that changes all the same must stand in the ledger, as telling of what was changed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed import registry
from splitfed.aggregation.lookup import kinds_of_sums
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import FED, LocalLink, Message
from splitfed.core.optimizers import Optim
from splitfed.core.private_values import BOTH, FEATURES, KINDS, LABELS, made_of, made_of_sum
from splitfed.core.random import stream
from splitfed.core.tasks import Task, classification
from splitfed.core.topology import Topology, member
from splitfed.data.dataset import ClientData, Federation
from splitfed.defenses import DpSgd, GaussianRelease, LabelDp
from splitfed.defenses.private_step import PrivateStep
from splitfed.federated import FedMD, MethodTraits
from splitfed.models.mlp import mlp
from splitfed.schedules import Independent, Sequential, SplitFedV1
from splitfed.topologies import local, multi_hop, u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.federated.examples import shared_probes
from tests.thinning import thin

CLASSES, ROWS = 3, 6
METHODS = tuple(registry.TABLES["methods"])
ONCE, GRADIENT = LabelDp(1.0), LabelDp(1.0, mode="gradient")
PLACES = {"activation": "releases on {edge} ", "gradient": "gradients on {edge} ", "label": "labels ", "norm": "norms "}
"""Kind of message -> how its place in the ledger begins."""

Seen = dict[tuple[str, str, str], list[str]]
"""Sender, kind and edge -> the digest of each message in turn."""


def net() -> nn.Module:
    with stream(0):
        return mlp((4,), CLASSES, (5, 4), seed=None)


def two_bottoms(labels: str) -> Topology:
    with stream(0):
        bottoms = {name: nn.Sequential(nn.Linear(2, 3), nn.Tanh()) for name in ("left", "right")}
        return vertical(bottoms, nn.Linear(6, CLASSES), labels=labels)


@cache
def shape(name: str) -> Topology:
    return {
        "local": lambda: local(net(), ("relu1",)),
        "vanilla": lambda: vanilla(net(), "relu1"),
        "u_shaped": lambda: u_shaped(net(), ("relu1", "relu2")),
        "multi_hop": lambda: multi_hop(net(), ("relu1", "relu2")),
        "vertical": lambda: two_bottoms("server"),
        "labels at a party": lambda: two_bottoms("left"),
    }[name]()


@cache
def clients(changed: str, columns: bool) -> Federation:
    """Two clients of six rows, two of them shown; `changed`: "nothing", all "labels", or one of the "rows"."""
    random, parts = torch.Generator().manual_seed(0), []
    for client in range(2):
        x, y = torch.randn(ROWS + 2, 4, generator=random), torch.arange(ROWS + 2) % CLASSES
        if changed == "labels":
            # No class keeps its number of rows, and every client has some of each.
            y[:ROWS] = torch.tensor([[1, 0, 0, 0, 1, 2], [2, 1, 1, 2, 0, 1]])[client]
        elif changed == "rows" and client == 0:
            x[0], y[0] = 1 - x[0], 2
        rows = sf.Dataset("six", x, y, classification(CLASSES))
        rows = rows.vertical({"left": range(2), "right": range(2, 4)}) if columns else rows
        held, scored = rows.rows(range(ROWS)), rows.rows(range(ROWS, ROWS + 2))
        parts.append(ClientData(f"client{client}", held, rows.rows([]), scored, torch.tensor([0, 3])))
    return Federation("six", parts[0].train.task, tuple(parts), parts[0].validation, parts[0].test, {})


def watch(patch: pytest.MonkeyPatch) -> Seen:
    """Return what will be seen of the messages of training."""
    seen: Seen = defaultdict(list)
    deliver = LocalLink.deliver

    def spy(self: LocalLink, message: Message) -> Message:
        if message.stamp.phase in ("train", "consult"):
            told = hashlib.sha256()
            for name, tensor in message.tensors.items():
                told.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
            seen[message.sender, message.kind, message.edge].append(told.hexdigest())
        return deliver(self, message)

    patch.setattr(LocalLink, "deliver", spy)
    return seen


def blind(patch: pytest.MonkeyPatch) -> None:
    """Let mechanisms make what does not depend on what they are given."""

    def even(self: LabelDp, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        return y if self.mode != "gradient" else torch.full((len(y), CLASSES), 1 / CLASSES)

    def one(self: LabelDp, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        return y if self.mode != "labels" else torch.arange(len(y)) % CLASSES

    def nothing(self: GaussianRelease, name: str, z: Tensor, context: Any) -> Tensor:
        return (z * 0).abs()

    patch.setattr(LabelDp, "targets", even)
    patch.setattr(LabelDp, "relabel", one)
    patch.setattr(GaussianRelease, "release", nothing)
    patch.setattr(PrivateStep, "_sum_clipped", lambda self, step: {})


def train(changed: str, name: str, defense: Defense, method: Any, schedule: Any) -> tuple[Run, Seen]:
    with pytest.MonkeyPatch.context() as patch, shared_probes():
        seen = watch(patch)
        blind(patch)
        data = clients(changed, name in ("vertical", "labels at a party"))
        options: dict[str, Any] = {"optimizer": Optim("SGD", {"lr": 0.05}), "batch_size": 3, "rounds": 1}
        run = sf.train(shape(name), data, schedule=schedule, defenses=defense, method=method, **options)
        return run, dict(seen)


def begins(kind: str, edge: str, of_steps: bool) -> str:
    """How the place of such messages begins in a ledger; `of_steps`: whether what a method sends is that of steps."""
    if edge.endswith(FED) and kind != "weights" and not of_steps:
        return "sums of " if kind in kinds_of_sums()[0] else f"{kind} that "
    return PLACES.get(kind, "weights ").format(edge=edge)


def compare(
    changed: str, name: str, defense: Defense, method: Any = None, schedule: Any = None
) -> tuple[Run, set[str], set[str]]:
    """Compare two runs; return the first, the kinds of what data owners sent in it, and those that changed.

    Fails for what changes and is not stated, and for a kind of which nobody says what it is made of.
    """
    plan = schedule or (Independent() if name == "local" else Sequential(hand_over="none"))
    run, before = train("nothing", name, defense, method, plan)
    _, after = train(changed, name, defense, method, plan)
    owners = {member(role, replica) for role in shape(name).data_roles for replica in range(2)}
    owned = [flow for flow in before | after if flow[0] in owners]
    moved = [flow for flow in owned if before.get(flow) != after.get(flow)]
    traits = MethodTraits() if run.method is None else run.method.traits(run.engine.topology)
    for _, kind, edge in moved:
        begin = begins(kind, edge, traits.post_processing)
        stated = [told for place, told in run.ledger.open.items() if place.startswith(begin)]
        assert stated, f"{kind} on {edge} changes with the {changed}, and is not stated"
        assert changed != "labels" or any("labels" in told for told in stated), f"{kind} on {edge} tells of labels"
    assert run.ledger.totals
    assert not moved or run.epsilon is None, f"{moved} change beside an epsilon of the whole run"
    assert {kind for _, kind, _ in owned} <= KINDS.keys() | set().union(*kinds_of_sums()) | traits.message_values.keys()
    return run, {kind for _, kind, _ in owned}, {kind for _, kind, _ in moved}


BARE = {
    "fedgen": {"label counts"},
    "aggregation": {"data"},
    "fedmd": {"data"},
    "mafml": {"data", "gradient"},
    "ifca": {"cluster", "weights"},
}
"""Method -> the kinds of messages by which labels get past noise on the gradients that they make."""
REFUSED = ("fedproto", "feddistill", "fedkd", "ditto", "apfl", "fml", "fedakt")
"""The methods that such noise refuses: they read labels at every step, or learn from them twice."""


@pytest.mark.parametrize("method", thin(METHODS, 2))
def test_what_labels_change_is_stated_beside_noise_on_their_gradients(method: str) -> None:
    name = "u_shaped" if method == "mafml" else "local"
    if method in REFUSED:
        with pytest.raises(InvalidInput, match=r"reads the labels of every step|learn from the same labels"):
            train("nothing", name, GRADIENT, method, Independent())
        return
    run, _, moved = compare("labels", name, GRADIENT, method)
    assert moved == BARE.get(method, set())
    assert (run.epsilon is None) is (method in BARE)
    assert ("nothing else crosses" in str(run.ledger)) is (method not in BARE)


@pytest.mark.parametrize("method", thin(["fedgen", "feddistill", "aggregation", "fedproto", "ifca"], 2))
def test_labels_that_were_changed_once_are_covered_wherever_they_go(method: str) -> None:
    run, sent, moved = compare("labels", "local", ONCE, method)
    assert not moved
    assert sent
    assert run.epsilon is not None


@pytest.mark.parametrize("name", ["u_shaped", "vertical"])
def test_without_a_method_noise_on_gradients_covers_labels(name: str) -> None:
    run, sent, moved = compare("labels", name, GRADIENT, schedule=Sequential())
    assert "gradient" in sent
    assert not moved
    assert run.epsilon is not None


ROWS_CHANGED = {
    "gradients of an owner": ("u_shaped", GaussianRelease(noise_multiplier=1.0), None, {"gradient", "weights"}),
    "labels": ("vanilla", GaussianRelease(noise_multiplier=1.0), None, {"label"}),
    "labels of a party": ("labels at a party", GaussianRelease(noise_multiplier=1.0), None, {"label"}),
    "shown rows": ("vanilla", GaussianRelease(noise_multiplier=1.0), "aggregation", {"data", "label"}),
    "soft labels": ("u_shaped", GaussianRelease(noise_multiplier=1.0), "fedmd", {"data", "gradient"}),
    "releases": ("vanilla", DpSgd(noise_multiplier=1.0), None, {"activation", "label"}),
}
"""What crosses beside a promise for rows: topology, defense, method, the kinds of messages that must change."""


@pytest.mark.parametrize("case", thin(ROWS_CHANGED, 2))
def test_what_a_row_changes_is_stated_beside_a_promise_for_rows(case: str) -> None:
    name, defense, method, kinds = ROWS_CHANGED[case]
    _, _, moved = compare("rows", name, defense, method, None if method else Sequential())
    assert kinds <= moved


class Tally(nn.Linear):
    """A frozen layer that counts what it has seen in a buffer, which crosses with its weights."""

    def __init__(self) -> None:
        super().__init__(4, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").add_(x.detach().sum())
        return super().forward(x)


@pytest.mark.parametrize("schedule", thin([SplitFedV1(), Sequential()], 2))
def test_weights_that_never_learn_tell_of_nothing(schedule: Any) -> None:
    frozen = GaussianRelease(noise_multiplier=1.0, freeze=True)
    run, sent, moved = compare("rows", "vanilla", frozen, schedule=schedule)
    assert "weights" in sent
    assert "weights" not in moved
    assert list(run.ledger.open) == ["labels of fc3 (client to server)"]
    run, _, moved = compare("rows", "vanilla", GaussianRelease(noise_multiplier=1.0), schedule=schedule)
    assert "weights of client" in run.ledger.open
    run, _, moved = compare("rows", "vertical", frozen, schedule=schedule)
    assert [place for place in run.ledger.open if place.startswith("weights")] == ["weights of server"]


def test_a_buffer_that_follows_the_rows_is_open_beside_frozen_weights() -> None:
    with stream(0):
        topology = vanilla(nn.Sequential(Tally(), nn.Tanh(), nn.Linear(5, CLASSES)), "1")
    frozen = GaussianRelease(noise_multiplier=1.0, freeze=True)
    run = sf.train(topology, clients("nothing", False), rounds=1, batch_size=3, schedule=SplitFedV1(), defenses=frozen)
    assert "weights of client" in run.ledger.open


def test_sums_are_made_of_what_is_summed() -> None:
    assert made_of_sum({"soft labels": FEATURES, "label counts": LABELS}) == BOTH
    assert made_of_sum({}) == made_of("of a kind that nobody knows", {}) == BOTH
    run, _, _ = compare("labels", "local", GRADIENT, FedMD(secure=True, batch=3))
    assert run.ledger.open["data that FedMD sends"] == "features and labels"


@pytest.mark.exhaustive
@pytest.mark.parametrize("changed", ["labels", "rows"])
@pytest.mark.parametrize("name", ["local", "vanilla", "u_shaped", "multi_hop", "vertical", "labels at a party"])
@pytest.mark.parametrize("method", [None, *METHODS])
def test_whatever_changes_is_stated(method: str | None, name: str, changed: str) -> None:
    """Every method on every topology under every schedule and defense that take it."""
    defenses: dict[str, tuple[Defense, ...]] = {
        "labels": (ONCE, GRADIENT),
        "rows": (GaussianRelease(noise_multiplier=1.0), DpSgd(noise_multiplier=1.0)),
    }
    for defense in defenses[changed]:
        for plan in (Independent(), Sequential(hand_over="none"), SplitFedV1()):
            try:
                compare(changed, name, defense, method, plan)
            except InvalidInput:
                continue
