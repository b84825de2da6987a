"""Whoever is handed something may write into it: the run, the experimenter's data and the next attack do not change.

The vandals here write zeros into every tensor that they are handed, through its storage and to its end, into every
weight of every module, and into all that what they may call returns.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.base import Attack, Knowledge, Needs, Phase, Progress, Target
from splitfed.attacks.training_time.attack_site import AttackSite
from splitfed.attacks.training_time.fsha import Fsha
from splitfed.attacks.training_time.training_attack import Seen, TrainingAttack, TrainingAttackState
from splitfed.core.messages import Message, Recording, View
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.tasks import classification
from splitfed.data.dataset import Federation
from splitfed.detectors.base import Detector, DetectorSite, DetectorState
from splitfed.engines.base import FED
from splitfed.federated import FML, FedMD, FedProto
from splitfed.models.mlp import mlp
from splitfed.threats.segment_runner import SegmentRunner
from splitfed.topologies import local, u_shaped, vanilla, vertical
from tests.examples import assert_same
from tests.object_graph import reachable

CALLED = ("query", "upstream", "sample", "predict", "model", "extractor")


def tensors(thing: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in what is handed out: in containers, fields, modules and attributes; no code is searched."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    inner: list[Any] = []
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        inner = [t for m in thing.modules() for t in (*m._parameters.values(), *m._buffers.values(), *vars(m).values())]
    elif isinstance(thing, Mapping):
        inner = [*thing.values()]
    elif isinstance(thing, (list, tuple, set)):
        inner = [*thing]
    elif dataclasses.is_dataclass(thing) or isinstance(thing, SegmentRunner):
        inner = [*vars(thing).values()]
    for one in inner:
        yield from tensors(one, seen)


def handed(view: View, knowledge: Knowledge) -> dict[str, list[Tensor]]:
    """Return every tensor that an attack is handed, by where it comes from, results of its calls among them."""
    found = {"messages": [*tensors([m.tensors for m in view.messages])], "segments": [*tensors(view.segments)]}
    for field in dataclasses.fields(knowledge):
        found[field.name] = [*tensors(getattr(knowledge, field.name))]
    x = torch.ones(2, *knowledge.shape)
    for name in CALLED:
        call = getattr(knowledge, name)
        if call is not None:
            found[f"{name}()"] = [*tensors(call(x))]
    if knowledge.architecture is not None:
        clone = knowledge.architecture(3)
        found["architecture()"] = [*tensors(clone), *clone.parameters()]
    if knowledge.fresh_model is not None:
        found["fresh_model()"] = [*tensors(knowledge.fresh_model(3))]
    if knowledge.exchanged is not None:
        last = knowledge.exchanged.rounds[-1]
        found["exchanged"] += [knowledge.exchanged.run(x, last.after)]
    y = torch.zeros(8, dtype=torch.int64)
    if knowledge.imitate is not None:
        trained = knowledge.imitate(torch.ones(8, *knowledge.shape), y, 1, 4, 0)
        found["imitate()"] = [trained.predict(x), *tensors(trained._engine.modules(0))]  # type: ignore[attr-defined]
    if knowledge.loss is not None and knowledge.query is not None:
        found["loss()"] = [knowledge.loss(x, knowledge.query(x), y[:2])]
    if knowledge.head is not None:
        found["head()"] = [*tensors(knowledge.head())]
    return found


def spoil(tensor: Tensor) -> None:
    """Write zeros over all of the storage, and leave an attribute behind."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
    tensor.spoilt = True  # type: ignore[attr-defined]


class Handed(Attack):
    """Base of the two below: what is handed to both is the same."""

    def predict(self, view: View, knowledge: Knowledge) -> Tensor:
        if self.target is Target.MEMBERS:
            assert knowledge.candidates is not None
            return torch.arange(float(len(knowledge.candidates)))
        if self.target is Target.LABELS:
            return torch.eye(knowledge.classes or 2)[torch.arange(COUNT) % (knowledge.classes or 2)]
        if self.target is Target.REPRESENTATIVES:
            return torch.zeros(knowledge.classes or 2, *knowledge.shape)
        return torch.zeros(COUNT if knowledge.local is None else sum(knowledge.local.batches), *knowledge.shape)

    def asks(self, classes: int | None) -> Mapping[int, int]:
        return {0: 1} if self.target is Target.LABELS else {}


COUNT = 12
FOUND: dict[str, dict[str, list[Tensor]]] = {}


class Vandal(Handed):
    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        everything = handed(view, knowledge)
        for held in everything.values():
            for tensor in held:
                spoil(tensor)
        for segment in view.segments.values():
            segment.train().requires_grad_(True)
            segment._forward_hooks[0] = lambda *given: torch.zeros(1)
        if isinstance(knowledge.hints, dict):
            knowledge.hints.clear()
        return self.predict(view, knowledge)


class Clerk(Handed):
    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        FOUND["newest"] = {
            name: [t.detach().clone() for t in held] for name, held in handed(view, knowledge).items() if held
        }
        return self.predict(view, knowledge)


def pair(needs: set[Needs], target: Target, phase: Phase, reads: tuple[str, ...]) -> tuple[Attack, Attack]:
    told = {"requires": frozenset(needs), "target": target, "phase": phase, "reads": reads}
    return tuple(dataclasses.dataclass(frozen=True)(type(base.__name__, (base,), told))() for base in (Vandal, Clerk))  # type: ignore[return-value]


def net() -> nn.Module:
    with stream(0):
        return nn.Sequential(nn.Flatten(), *mlp((8, 8), 10, (16, 12)).children())


def model() -> nn.Module:
    with stream(0):
        return mlp((8, 8), 10, (16, 12))


@cache
def digits(clients: int = 1, public: float = 0.0) -> Federation:
    data = sf.data.digits().rows(range(90))
    named = data.halves().with_target("parity", data.y % 2, classification(2))
    return named.clients(clients, auxiliary=20, victims=COUNT, validation=0.0, test=0.1, public=public)


def bottoms() -> dict[str, nn.Module]:
    with stream(0):
        return {side: nn.Sequential(nn.Flatten(), nn.Linear(32, 6)) for side in ("left", "right")}


@cache
def run_of(name: str) -> sf.Run:
    fast = {"rounds": 1, "batch_size": 16}
    if name == "vanilla":
        return sf.train(
            vanilla(model(), "relu1"),
            digits(),
            adversaries=sf.Adversaries(training_attacks={"server": Fsha(width=4)}),
            **fast,
        )
    if name == "u_shaped":
        return sf.train(u_shaped(model(), ("relu1", "relu2")), digits(), **fast)
    if name == "vertical":
        return sf.train(vertical(bottoms(), nn.Linear(12, 10), labels="server"), digits(), **fast)
    if name == "averaged":
        sgd = Optim("SGD", {"lr": 0.1})
        whole = sf.Topology(
            "whole",
            (sf.Segment("model", "client", model(), ("x",), ("out",)),),
            {"x": "client"},
            (sf.Head("out", "client", "client"),),
        )
        settings = {
            "schedule": "splitfed_v1",
            "optimizer": sgd,
            "logging": sf.Logging(record=Recording((FED,))),
            **fast,
            "batch_size": 90,
        }
        return sf.train(whole, digits(2), **settings)
    methods: dict[str, Any] = {"proto": FedProto(), "meme": FML(), "public": FedMD()}
    settings = {
        "schedule": "independent",
        "method": methods[name],
        "logging": sf.Logging(record=Recording((FED,))),
        **fast,
        # Scores of public rows come from the second round on.
        "rounds": 2 if name == "public" else 1,
    }
    return sf.train(local(model(), ("relu1",)), digits(2, 0.3 if name == "public" else 0.0), **settings)


KNOWN = {Needs.AUXILIARY, Needs.AUXILIARY_LABELS, Needs.ATTRIBUTES}
UPSTREAM = {Needs.QUERIES, Needs.UPSTREAM, Needs.PREDICTIONS, Needs.MODEL, Needs.ARCHITECTURE}
CASES: dict[str, tuple[str, str, set[Needs], Target, Phase, tuple[str, ...]]] = {
    "releases": (
        *("vanilla", "server", {Needs.RELEASES, *KNOWN, *UPSTREAM, Needs.DOWNSTREAM, Needs.IMITATION}),
        *(Target.INPUTS, Phase.INFERENCE, ()),
    ),
    "training attack": (
        "vanilla",
        "server",
        {Needs.RELEASES, Needs.TRAINING_ATTACK},
        Target.INPUTS,
        Phase.INFERENCE,
        (),
    ),
    "candidates": ("vanilla", "server", {Needs.RELEASES, Needs.CANDIDATES}, Target.MEMBERS, Phase.INFERENCE, ()),
    "gradients": ("u_shaped", "server", {Needs.GRADIENTS, Needs.HEAD, *KNOWN}, Target.LABELS, Phase.STEP, ()),
    "own inputs": ("vertical", "left0", {Needs.OWN_INPUTS, *KNOWN}, Target.INPUTS, Phase.STEP, ()),
    "updates": ("averaged", FED, {Needs.UPDATES, Needs.AUXILIARY}, Target.INPUTS, Phase.TRAINING, ()),
    "uploads": (
        *("proto", FED, {Needs.UPLOADS, Needs.EXTRACTOR, *KNOWN}),
        *(Target.REPRESENTATIVES, Phase.TRAINING, ("prototype",)),
    ),
    "exchanged": (
        *("meme", FED, {Needs.UPLOADS, Needs.EXCHANGED_MODEL, Needs.FRESH_MODEL}),
        *(Target.REPRESENTATIVES, Phase.TRAINING, ("weights",)),
    ),
    "public scores": (
        *("public", FED, {Needs.UPLOADS, Needs.PUBLIC_SCORES}),
        *(Target.REPRESENTATIVES, Phase.TRAINING, ("soft labels",)),
    ),
}
HELD = {
    "releases": {"messages", "segments", "auxiliary", "auxiliary_labels", "attributes", "places", "architecture()"}
    | {"loss()", "imitate()"}
    | {f"{name}()" for name in CALLED if name != "extractor"},
    "training attack": {"messages", "training_attack"},
    "candidates": {"messages", "candidates", "candidate_labels"},
    "gradients": {"messages", "hints", "head()"},
    "own inputs": {"messages", "own", "own_auxiliary"},
    "updates": {"messages", "local", "auxiliary"},
    "uploads": {"messages", "extractor()"},
    "exchanged": {"messages", "exchanged", "fresh_model()"},
    "public scores": {"messages", "public_scores"},
}


def everything(run: sf.Run) -> dict[str, Any]:
    """Return copies of the run's state, of what was recorded, of the user's modules and of all of the data."""
    engine, data = run.engine, run.data
    state = run.state()
    # Queries are counted, as they should be; what training sent stays as it was.
    state["run"] = {**state["run"], "traffic": engine.traffic.bytes("train")}
    rows = [data.auxiliary, data.victims, *(d for c in data.clients for d in (c.train, c.validation, c.test))]
    return copy.deepcopy(
        {
            "state": state,
            "recorded": {p: [dict(m.tensors) for m in engine.view(p).messages] for p in engine.link.recorders},
            "topology": [s.module.state_dict() for t in engine.topologies for s in t.segments],
            "modes": [m.training for t in engine.topologies for s in t.segments for m in s.module.modules()],
            "data": [[d.x, d.y, *(t.y for t in d.targets.values())] for d in rows],
            "positions": {name: part.positions for name, part in data.features.items()},
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_an_attack_that_writes_zeros_into_all_it_gets_changes_nothing(name: str) -> None:
    world, party, needs, target, phase, reads = CASES[name]
    run, (vandal, clerk) = run_of(world), pair(needs, target, phase, reads)
    results = []
    before = everything(run)
    for attack in (clerk, vandal, clerk):
        (result,) = run.attack(attack, adversary=party)
        results.append((result.prediction, result.truth, result.scores))
        if attack is clerk:
            FOUND[f"{name} {len(results)}"] = FOUND.pop("newest")
    assert set(FOUND[f"{name} 1"]) >= HELD[name], "the vandal must have been handed all that this case is about"
    assert_same(everything(run), before)
    assert_same(FOUND[f"{name} 3"], FOUND[f"{name} 1"])
    assert_same(results[0][:2], results[2][:2])
    assert_same(results[0][:2], results[1][:2])
    assert results[0][2] == results[1][2] == results[2][2]


def test_every_attribute_of_knowledge_is_in_some_case() -> None:
    plain = {"shape", "value_range", "device", "classes", "origins", "encrypted_layer"}
    found = {name.removesuffix("()") for held in HELD.values() for name in held}
    assert found - {"messages", "segments"} == {f.name for f in dataclasses.fields(Knowledge)} - plain
    assert {f.name for f in dataclasses.fields(View)} == {"party", "messages", "segments"}


@pytest.mark.parametrize("name", CASES)
def test_what_an_attack_is_handed_is_nobody_elses_memory(name: str) -> None:
    """And holds no number beside its own, of a storage that it would share with the victims' rows for instance."""
    world, party, needs, target, phase, reads = CASES[name]
    run, (_, clerk) = run_of(world), pair(needs, target, phase, reads)
    kept: list[Tensor] = []

    def keep(self: Attack, view: View, knowledge: Knowledge, random: torch.Generator, progress: Progress) -> Tensor:
        kept.extend(t for held in handed(view, knowledge).values() for t in held)
        return Handed.predict(self, view, knowledge)  # type: ignore[arg-type]

    type(clerk).run = keep  # type: ignore[method-assign]
    run.attack(clerk, adversary=party)
    owned = {
        t.untyped_storage().data_ptr()
        for start in (run.engine.parties, run.engine.link.recorders, run.data, run.engine.topologies)
        for t in reachable(start)
        if isinstance(t, Tensor) and t.numel()
    }
    for tensor in kept:
        if tensor.numel():
            assert tensor.untyped_storage().data_ptr() not in owned
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor._base is None


class Wrecker(TrainingAttack):
    """Lives in the training, passive: writes zeros into its site, the segments and every message."""

    learns_from: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY, Needs.AUXILIARY_LABELS, Needs.ARCHITECTURE})

    def enter(self, site: AttackSite) -> TrainingAttackState:
        for tensor in tensors([site.knowledge, site.segments]):
            spoil(tensor)
        return Wreck(self, site)


class Wreck(TrainingAttackState):
    def build(self) -> None:
        self.nets.add("net", nn.Linear(2, 2), 0.1)

    def receive(self, message: Message) -> None:
        super().receive(message)
        for tensor in message.tensors.values():
            spoil(tensor)

    def send(self, message: Message) -> Message:
        for tensor in copy.copy(message.tensors).values():
            tensor.add_(0.0)
        return super().send(message)

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> None:
        for tensor in tensors([seen.z, seen.y, modules]):
            spoil(tensor)

    def predict(self, view: View, target: Target) -> Tensor:
        raise AssertionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sleeper(Detector):
    """Writes zeros into the rows that it is shown, and is content with everything."""

    def watch(self, site: DetectorSite) -> DetectorState:
        for tensor in (*site.inputs.values(), *site.labels.values()):
            spoil(tensor)
        return Calm()


class Calm(DetectorState):
    def look(self, gradient: Tensor) -> bool:
        spoil(gradient)
        return True


@pytest.mark.parametrize(
    "who",
    [
        {"adversaries": sf.Adversaries(training_attacks={"server": dataclasses.dataclass(frozen=True)(Wrecker)()})},
        {"adversaries": sf.Adversaries(detectors={"client0": Sleeper()})},
    ],
    ids=["training attack", "detector"],
)
def test_a_vandal_inside_the_training_changes_nothing(who: dict[str, Any]) -> None:
    def trained(**more: Any) -> dict[str, Any]:
        topology = vanilla(model(), "relu1")
        run = sf.train(
            topology, digits(), rounds=2, batch_size=16, logging=sf.Logging(record=Recording(("server",))), **more
        )
        kept = everything(run)
        for name in ("training_attacks", "detectors"):
            kept["state"]["run"].pop(name)
        return kept

    alone: Callable[[], dict[str, Any]] = trained
    assert_same(trained(**who), alone())


def test_an_auxiliary_row_brings_no_victim_along() -> None:
    """Rows that the experimenter cut from one tensor are handed to an attack without the others."""
    whole, stolen = sf.data.digits().rows(range(90)), []
    parts = whole.clients(1, auxiliary=20, victims=COUNT, validation=0.0, test=0.1)
    shared = torch.cat([parts.auxiliary.x, parts.victims.x])
    cut = [dataclasses.replace(parts.auxiliary, x=shared[:20]), dataclasses.replace(parts.victims, x=shared[20:])]
    data = dataclasses.replace(parts, auxiliary=cut[0], victims=cut[1])
    _, reader = pair({Needs.RELEASES, Needs.AUXILIARY}, Target.INPUTS, Phase.INFERENCE, ())

    def read(self: Attack, view: View, knowledge: Knowledge, random: torch.Generator, progress: Progress) -> Tensor:
        assert knowledge.auxiliary is not None
        stolen.append(knowledge.auxiliary.untyped_storage().nbytes() - knowledge.auxiliary.nbytes)
        return Handed.predict(self, view, knowledge)  # type: ignore[arg-type]

    type(reader).run = read  # type: ignore[method-assign]
    sf.train(vanilla(model(), "relu1"), data, rounds=1).attack(reader)
    assert stolen == [0]
