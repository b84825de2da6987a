"""The defenses of inputs that are learnt or simple, all in one run: what leaves, what is learnt, bytes, resuming."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.defenses import (
    Adversarial,
    ChannelPruning,
    Dropout,
    Latent,
    Mid,
    MidLabels,
    Quantization,
    Shredder,
    TopK,
)
from splitfed.planning.plan import cost
from splitfed.planning.validation import Prepared, prepare
from splitfed.schedules.base import Training
from splitfed.threats.segment_runner import SegmentRunner
from splitfed.topologies import multi_task, u_shaped, vanilla
from splitfed.training.run import Run
from tests.examples import InPlaceAfterCut, SmallUNet, assert_same, toy_data

DEFENSES: dict[str, Defense] = {
    "channel_pruning": ChannelPruning(ratio=0.5, hard=True, width=8),
    "adversarial": Adversarial(threshold=-1.0, bottleneck=3, width=8),
    "mid": Mid(weight=1e-3),
    "shredder": Shredder(members=4, scale=0.1),
    "dropout": Dropout(rate=0.5),
    "quantization": Quantization(bits=3),
    "top_k": TopK(k=50),
}
FITTED = ("channel_pruning", "adversarial", "mid", "shredder")
# Bytes of 35 rows of 6 x 8 x 8 numbers: half the channels, 3 bits each and a range, 50 numbers and places of 9 bits.
SENT = {"adversarial": 35 * 3 * 64 * 4, "quantization": 35 * 384 * 3 // 8 + 8, "top_k": 35 * 50 * 4 + 1969}
ROUNDS = 2


def topology() -> Topology:
    with stream(0):
        return vanilla(InPlaceAfterCut(), "conv")


@cache
def federation() -> Federation:
    return toy_data(120).clients(2, auxiliary=10, victims=10)


def trained(*defenses: Defense, **options: Any) -> Run:
    given = {"schedule": "splitfed_v1", "rounds": ROUNDS, "batch_size": 35, "defenses": defenses, **options}
    return splitfed.train(topology(), federation(), **given)


@cache
def finished(name: str | None) -> Run:
    return trained(*([] if name is None else [DEFENSES[name]]))


def released(run: Run, number: int = 0) -> Tensor:
    """What arrives when the first client predicts its training rows."""
    with run.engine.record_party("server") as recorder:
        run.engine.predict(0, "train", "evaluate", number)
    return recorder.view().select(kind="activation").tensors()["conv"]


def upstream(run: Run) -> SegmentRunner:
    engine = run.engine
    modules = {
        n: m for party in (engine.party(0, r) for r in engine.topology.roles) for n, m in party.state.modules.items()
    }
    return SegmentRunner(
        engine.topology, engine.facts, modules, lambda x: {"x": x}, role="server", defenses=engine.defenses
    )


def prepared(name: str) -> Prepared:
    guards, training = (DEFENSES[name],), Training(35)
    return prepare(topology(), federation(), schedule="splitfed_v1", defenses=guards, optimizer=None, training=training)


def weights(run: Run, role: str, replica: int = 0) -> dict[str, Tensor]:
    """The state of the role's segments, without the name that a wrapper puts before those of what it wraps."""
    states = [m.state_dict() for m in run.engine.party(replica, role).state.modules.values()]
    return {name.removeprefix("module."): t for state in states for name, t in state.items()}


def _pruned(z: Tensor, mean: Tensor) -> bool:
    hidden = (z.flatten(2) == 0).all(2).sum(1)
    return bool((hidden >= 3).all() and (hidden < 6).all() and torch.equal(z, mean))


def _added(z: Tensor, mean: Tensor) -> bool:
    """Four members: no more than four different things were added, and not one alone."""
    noise = (z - mean).flatten(1).double()
    alike = torch.cdist(noise, noise) < 1e-3
    return 1 < len(alike.unique(dim=0)) <= 4


SEEN: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "channel_pruning": _pruned,
    "adversarial": lambda z, mean: z.shape[1] == 3 and torch.equal(z, mean),
    "mid": lambda z, mean: 1e-3 < float((z - mean).std()) < 3,
    "shredder": _added,
    "dropout": lambda z, mean: 0.45 < float((z == 0).double().mean()) < 0.55,
    "quantization": lambda z, mean: 4 < len(z.unique()) <= 8 and torch.equal(z, mean),
    "top_k": lambda z, mean: bool(((z.flatten(1) != 0).sum(1) == 50).all()),
}


@pytest.mark.parametrize("name", DEFENSES)
def test_what_arrives_and_what_an_adversary_models(name: str) -> None:
    """A release is defended outside training, too; the mean that a white-box adversary takes is of the same make."""
    run = finished(name)
    z, x = released(run), federation().clients[0].train.x
    mean = upstream(run)(x)["conv"]
    assert z.shape == mean.shape
    assert SEEN[name](z[: len(x)], mean)
    random = name in ("mid", "shredder", "dropout")
    assert torch.equal(released(run, 1), z) != random
    sample = upstream(run).sample(x)["conv"]
    assert torch.allclose(sample, mean) != random
    assert SEEN[name](sample, mean)


@pytest.mark.parametrize("name", DEFENSES)
def test_removing_it_changes_what_is_learnt_and_bytes_are_those_planned(name: str) -> None:
    run, bare = finished(name), finished(None)
    first, second = (weights(r, "server") for r in (run, bare))
    assert max(float((first[n] - t).abs().max()) for n, t in second.items()) > 1e-4
    counted = {flow: n for flow, n in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert cost(prepared(name), ROUNDS).flows == counted
    sent = sum(n for flow, (_, n) in counted.items() if flow.kind == "activation")
    assert [len(client.train) for client in federation().clients] == [35, 35]
    assert sent == ROUNDS * 2 * SENT.get(name, 35 * 384 * 4)


@pytest.mark.parametrize("name", FITTED)
def test_layers_are_learnt_averaged_and_handed_over(name: str) -> None:
    """What the clients get in the second round is the mean of what they gave in the first, the new layers included."""
    run = trained(DEFENSES[name], logging=splitfed.Logging(record=splitfed.Recording(("fed_server",))))
    assert_same(run.engine.state()["parties"], finished(name).engine.state()["parties"])
    (start, *_), given, taken = (
        [m.tensors for m in run.engine.view("fed_server").messages if (m.stamp.epoch, m.sender == "fed_server") == when]
        for when in ((0, True), (0, False), (1, True))
    )
    layers = [n for n in start if n.startswith("bottom/layers.")]
    assert layers
    assert len(given) == len(taken) == 2
    assert_same(taken[0], taken[1])
    for n in layers:
        assert not torch.equal(given[0][n], start[n])
        assert torch.allclose(taken[0][n], (given[0][n] + given[1][n]) / 2, atol=1e-7)
    frozen = [torch.equal(given[0][n], start[n]) for n in start if n not in layers]
    assert all(frozen) if name == "shredder" else not any(frozen)


class Stop(Exception):
    """Stands for a crash."""


def stop_first(done: int, rounds: int, metrics: Any) -> None:
    raise Stop


@pytest.mark.parametrize("name", DEFENSES)
def test_stopped_and_resumed(name: str, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        trained(DEFENSES[name], logging=splitfed.Logging(folder=tmp_path / "run", progress=stop_first))
    resumed = trained(DEFENSES[name], logging=splitfed.Logging(folder=tmp_path / "run", resume=True))
    assert_same(resumed.engine.state()["parties"], finished(name).engine.state()["parties"])
    kept = resumed.engine.state()["parties"]["client0"]["defenses"]
    assert bool(kept) == (name in ("channel_pruning", "adversarial"))


@pytest.mark.parametrize("name", DEFENSES)
def test_the_task_is_still_learnt(name: str) -> None:
    """Ten digits: a tenth is chance."""
    data = splitfed.data.digits().rows(range(900)).clients(1, auxiliary=50, victims=50, seed=1)
    adam = Optim("Adam", {"lr": 1e-2})
    run = splitfed.train(topology(), data, defenses=[DEFENSES[name]], rounds=4, batch_size=50, optimizer=adam)
    assert run.accuracy > 0.4


def test_two_of_a_kind_and_edges_left_open_are_refused() -> None:
    for name in FITTED:
        with pytest.raises(InvalidInput, match=f"{name} guards value 'conv' twice"):
            trained(DEFENSES[name], DEFENSES[name])
    tops = {"a": nn.Linear(6, 10), "b": nn.Linear(6, 10)}
    two = multi_task({"client": nn.Sequential(nn.Flatten(), nn.Linear(64, 6))}, tops, targets={"a": None, "b": None})
    open_edge = Mid(on=(two.crossings[0].name,))
    with pytest.raises(InvalidInput, match=r"mid guards '.*', which also leaves on edge '.*'; guard that one too"):
        open_edge.fit(two, finished(None).engine.facts, 0)


def test_no_decoder_without_raw_input_and_no_bottleneck_without_images() -> None:
    unet = u_shaped(SmallUNet(), ("pool1", "up2"))
    facts = finished(None).engine.facts
    for kind in (ChannelPruning, Adversarial):
        with pytest.raises(InvalidInput, match="cannot guard edge 'middle->head': role 'server' has no raw input"):
            kind(on=("middle->head",)).fit(unet, facts, 0)
    with stream(0):
        flat = vanilla(InPlaceAfterCut(), "fc1")
    with pytest.raises(InvalidInput, match=r"adversarial has no bottleneck for 'fc1' of shape \(16,\) a row"):
        splitfed.train(flat, federation(), defenses=[Adversarial()], rounds=1, batch_size=20)
    vectors = splitfed.data.breast_cancer().rows(range(80)).clients(1, auxiliary=8, victims=8)
    with stream(0):
        table = vanilla(splitfed.models.mlp((30,), 1, (8, 8), seed=None), "relu1")
    with pytest.raises(InvalidInput, match=r"adversarial compares images, and role 'client' has rows of \(30,\)"):
        splitfed.train(table, vectors, defenses=[Adversarial(bottleneck=0)], rounds=1, batch_size=20)
    with pytest.raises(InvalidInput, match="top_k k=500 is not allowed: 'conv' has 384 numbers a row"):
        trained(TopK(k=500))


class Norms(nn.Module):
    """Batch norm in each of three pieces; what it has seen is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm1 = nn.Linear(64, 8), nn.BatchNorm1d(8)
        self.fc2, self.norm2 = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.norm3, self.fc3 = nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(self.fc1(x.flatten(1)))
        return self.fc3(self.norm3(self.norm2(self.fc2(h))))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("defense", [Mid(), MidLabels(), Latent(epsilon=1e3)])
def test_what_layers_are_put_around_is_trained_as_it_would_be_without_them(defense: Defense, frozen: bool) -> None:
    """A model given as a whole in evaluation mode learns; what its owner has put in evaluation mode does not."""
    with stream(0):
        model = Norms()
    for module in (model.norm1, model.norm2, model.norm3) if frozen else (model,):
        module.eval()
    data = toy_data(40).clients(1, auxiliary=4, victims=4)
    run = splitfed.train(u_shaped(model, ("norm1", "norm2")), data, defenses=[defense], rounds=1, batch_size=64)
    state = run.engine.topology.state_dict(run.engine.modules(0))
    seen = [int(t) for name, t in state.items() if name.endswith("num_batches_tracked")]
    assert seen == [0 if frozen else 1] * 3


@pytest.mark.parametrize("defense", [ChannelPruning(), Mid(), Shredder(), Quantization(per="channel")])
def test_vectors_too(defense: Defense) -> None:
    """Features are channels, and a perceptron decodes them."""
    with stream(0):
        flat = vanilla(InPlaceAfterCut(), "fc1")
    run = splitfed.train(flat, federation(), defenses=[defense], rounds=1, batch_size=20)
    assert 0 <= run.accuracy <= 1
