"""The CNN of heartbeats: its layers, what the server holds of it, and that the cut model trains to the uncut bits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.optimizers import Optim
from splitfed.data import beats, digits
from splitfed.models import ecg_cnn, mlp
from splitfed.topologies import u_shaped
from tests.examples import engine_of, refusal

CUTS = ("flatten", "fc1")


def test_layers() -> None:
    plain, wide = ecg_cnn((1, 128), 5), ecg_cnn((1, 128), 5, server_width=16)
    features = ("conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten")
    assert tuple(name for name, _ in plain.named_children()) == (*features, "fc1", "head")
    assert tuple(name for name, _ in wide.named_children()) == (*features, "fc1", "relu3", "fc2")
    assert all(isinstance(wide.get_submodule(f"relu{i}"), nn.LeakyReLU) for i in (1, 2, 3))
    assert all(isinstance(plain.get_submodule(f"pool{i}"), nn.MaxPool1d) for i in (1, 2))
    assert plain.cuts == (*features, "fc1")
    assert wide.cuts == (*features, "fc1", "relu3")
    # 16 kernels of 7 and 8 of 16 x 5, each with a bias; then 256 features.
    assert sum(p.numel() for p in plain.parameters()) == 128 + 648 + 257 * 5
    assert sum(p.numel() for p in wide.parameters()) == 128 + 648 + 257 * 16 + 17 * 5


@pytest.mark.parametrize(("length", "features"), [(128, 256), (4, 8), (130, 256), (131, 256), (132, 264)])
def test_features(length: int, features: int) -> None:
    model = ecg_cnn((1, length), 5)
    assert model.fc1.in_features == features
    assert model[:7](torch.rand(3, 1, length)).shape == (3, features)


def test_rows_without_a_channel_are_of_one() -> None:
    x = torch.rand(4, 1, 128)
    assert torch.equal(ecg_cnn((128,), 5)(x[:, 0]), ecg_cnn((1, 128), 5)(x))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 3), (3,), (0, 128), ()])
def test_shapes_refused(shape: tuple[int, ...]) -> None:
    wanted = "expected (channels, length) or (length,), length of at least 4"
    assert refusal(ecg_cnn, shape=shape, outputs=5) == f"ecg_cnn cannot take rows of shape {shape}; {wanted}"


@pytest.mark.parametrize("name", ["outputs", "server_width"])
def test_widths_refused(name: str) -> None:
    given: dict[str, Any] = {"shape": (1, 128), "outputs": 5, name: 0}
    assert refusal(ecg_cnn, **given) == f"{name}=0 is not allowed; expected a whole number of at least 1"


def server_layers(model: nn.Module, cuts: Sequence[str], example: Tensor) -> list[nn.Module]:
    """Return what the server of a U-shape runs on the rows that arrive, after a check that client and server agree."""
    topology = u_shaped(model, cuts)
    assert [(segment.name, segment.role) for segment in topology.segments] == [
        ("bottom", "client"),
        ("middle", "server"),
        ("head", "client"),
    ]
    bottom, middle, head = (segment.module for segment in topology.segments)
    assert torch.equal(head(middle(bottom(example))), model(example))
    called = [node for node in middle.graph.nodes if node.op not in ("placeholder", "output")]  # type: ignore[union-attr]
    assert all(node.op == "call_module" for node in called)
    return [middle.get_submodule(str(node.target)) for node in called]


@pytest.mark.parametrize("width", [None, 16])
def test_the_server_holds_one_linear_layer(width: int | None) -> None:
    (layer,) = server_layers(ecg_cnn((1, 128), 5, width), CUTS, torch.rand(3, 1, 128))
    assert isinstance(layer, nn.Linear)
    assert layer.weight.shape == (width or 5, 256)


@pytest.mark.parametrize(
    ("hidden", "head", "cuts", "shape"),
    [([32], True, ("relu1", "fc2"), (10, 32)), ([32, 16], False, ("relu1", "fc2"), (16, 32))],
)
def test_so_it_does_of_an_mlp(hidden: list[int], head: bool, cuts: tuple[str, str], shape: tuple[int, int]) -> None:
    data = digits()
    model = mlp(data.shape, data.task.outputs, hidden, identity_head=head)
    (layer,) = server_layers(model, cuts, data.x[:3])
    assert isinstance(layer, nn.Linear)
    assert layer.weight.shape == shape


@pytest.mark.parametrize("optim", [Optim("SGD", {"lr": 0.05, "momentum": 0.9}), Optim("Adam", {"lr": 1e-3})])
@pytest.mark.parametrize("width", [None, 16])
def test_cut_it_trains_to_the_bits_of_the_uncut_model(width: int | None, optim: Optim) -> None:
    data = beats(60)
    model = ecg_cnn(data.shape, 10, width)
    uncut, topology = copy.deepcopy(model), u_shaped(model, CUTS)
    engine = engine_of(topology, data.x, data.y, optim=optim)
    steps = [torch.arange(i, i + 12) for i in (0, 12, 24, 36, 48, 6)]
    optimizer, _ = optim.build(uncut.parameters())
    losses = []
    for rows in steps:
        loss = functional.cross_entropy(uncut(data.x[rows]), data.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert engine.train(0, 0, steps) == losses
    found, expected = topology.state_dict(engine.modules(0)), uncut.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_run_learns_beats_and_sends_the_server_features_alone() -> None:
    data = beats(400).clients(1, auxiliary=20, victims=10, seed=0)
    run = sf.train(
        u_shaped(ecg_cnn((1, 128), 5), CUTS),
        data,
        rounds=10,
        batch_size=32,
        optimizer=Optim("SGD", {"lr": 0.02, "momentum": 0.9}),
        seed=0,
    )
    assert run.accuracy > 0.5
    assert set(run.engine.traffic.by_kind()) == {"activation", "gradient"}
