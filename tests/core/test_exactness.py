"""A topology without defenses trains to the same bits as the uncut model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.messages import Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, stream
from splitfed.core.step_state import forward_seed
from splitfed.core.topology import Topology
from splitfed.models.lenet import lenet
from splitfed.models.resnet8 import resnet8
from splitfed.topologies import u_shaped, vanilla
from tests.examples import Dropped, InPlaceAfterCut, SmallUNet, engine_of, images
from tests.thinning import thin

STEPS, BATCH = 56, 8
SGD = Optim("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4})
ADAM = Optim("Adam", {"lr": 1e-3})
MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[str, str]]] = {
    "lenet": (lambda: lenet((1, 8, 8), 10, seed=None), "pool1", ("conv2", "fc2")),
    "resnet8": (lambda: resnet8((1, 8, 8), 10, seed=None), "", ("", "")),
    "unet": (SmallUNet, "down2", ("pool1", "up2")),
    "unet_inside": (SmallUNet, "down1.0", ("down1.1", "middle.0")),
    "in_place": (InPlaceAfterCut, "conv", ("conv", "fc1")),
}


def build(name: str) -> tuple[nn.Module, str, tuple[str, str]]:
    factory, one, two = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(derive(0, name))
        model = factory()
    if name == "resnet8":
        cuts = model.cuts
        one, two = cuts[1], (cuts[0], cuts[-2])
    return model, one, two


def reference(model: nn.Module, optim: Optim, x: Tensor, y: Tensor, order: Iterable[Tensor]) -> list[float]:
    """Train `model` as anybody would without a cut."""
    model.train()
    optimizer, _ = optim.build(model.parameters())
    losses = []
    for rows in order:
        loss = functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def order(rows: int) -> list[Tensor]:
    full = [
        t for _ in range(STEPS) for t in torch.randperm(rows, generator=torch.Generator().manual_seed(1)).split(BATCH)
    ]
    return full[:STEPS]


def assert_same_bits(topology: Topology, modules: dict[str, nn.Module], model: nn.Module) -> None:
    state, expected = topology.state_dict(modules), model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("optim", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("shape", ["vanilla", "u_shaped"])
@pytest.mark.parametrize("name", thin(MODELS, 3))
def test_split_training_equals_uncut_training(name: str, shape: str, optim: Optim) -> None:
    model, one, two = build(name)
    uncut = copy.deepcopy(model)
    topology = vanilla(model, one) if shape == "vanilla" else u_shaped(model, two)
    x, y = images(100)
    engine = engine_of(topology, x, y, optim=optim)
    steps = order(len(x))
    assert engine.train(0, 0, steps) == reference(uncut, optim, x, y, steps)
    assert_same_bits(topology, engine.modules(0), uncut)
    uncut.eval()
    with torch.no_grad():
        expected = uncut(x)
    got = engine.predict(0, "train", "evaluate", batch_size=len(x)).outputs
    assert torch.equal(next(iter(got.values())), expected)


def test_the_model_given_is_left_alone() -> None:
    model, one, _ = build("lenet")
    before = copy.deepcopy(model.state_dict())
    engine_of(vanilla(model, one), *images(40)).train(0, 0, order(40))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_dropout_equals_a_reference_reseeded_at_the_cut() -> None:
    model = Dropped()
    topology, uncut = vanilla(model, "relu1"), copy.deepcopy(model)
    x, y = images(100)
    engine = engine_of(topology, x, y, optim=SGD, seed=7)
    steps = order(len(x))
    engine.train(0, 0, steps)
    optimizer, _ = SGD.build(uncut.parameters())
    for step, rows in enumerate(steps):
        stamp = Stamp("train", 0, 0, step)
        with stream(forward_seed(7, "client0", "bottom", stamp)):
            h = uncut.relu1(uncut.drop1(uncut.fc1(x[rows].flatten(1))))
        with stream(forward_seed(7, "server", "top", stamp)):
            out = uncut.fc3(uncut.drop2(torch.relu(uncut.fc2(h))))
        loss = functional.cross_entropy(out, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_same_bits(topology, engine.modules(0), uncut)


def test_a_receiver_that_overwrites_leaves_the_senders_memory_alone() -> None:
    model = InPlaceAfterCut()
    engine = engine_of(vanilla(model, "conv"), *images(16))
    with engine.record_party("server") as recorder:
        engine.train(0, 0, [torch.arange(16)])
    sent = recorder.view().select("activation").tensors()["conv"]
    assert bool((sent < 0).any()), "a ReLU in place at the receiver must not reach what was sent"
