"""The models: shapes, parameter counts worked out by hand, cut points, tracing, and building from a seed."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import splitfed.models
from splitfed import registry
from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive, generator, stream
from splitfed.models import build
from splitfed.models.build import make
from splitfed.models.import_paths import NameResolver
from tests.examples import assert_same

# Those that need an architecture have tests of their own.
NAMES = sorted(set(registry.TABLES["models"]) - {"transformers"})
SHAPES: list[tuple[int, ...]] = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 29, 17)]
SIGNALS: dict[str, list[tuple[int, ...]]] = {"ecg_cnn": [(1, 128), (128,), (3, 65)]}
"""The models of signals, and shapes that they take; all others take images."""


def shape_of(name: str) -> tuple[int, ...]:
    """Return a shape of rows that the model takes."""
    return SIGNALS.get(name, [(3, 32, 32)])[0]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in NAMES for shape in SIGNALS.get(name, SHAPES)])
def test_one_output_a_class(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7, seed=0)
    assert model(torch.rand(2, *shape, generator=generator(0))).shape == (2, 7)


def conv(inputs: int, outputs: int, side: int, bias: bool = True) -> int:
    return inputs * outputs * side**2 + (outputs if bias else 0)


def block(inputs: int, outputs: int) -> int:
    """Two 3x3 convolutions and a 1x1 shortcut where the width grows, each with BatchNorm (2 a channel)."""
    count = conv(inputs, outputs, 3, False) + conv(outputs, outputs, 3, False) + 4 * outputs
    return count + (conv(inputs, outputs, 1, False) + 2 * outputs if inputs != outputs else 0)


def vgg(channels: list[int]) -> int:
    return sum(conv(i, o, 3) + 2 * o for i, o in pairwise(channels))


COUNTS = [
    # LeNet-5: two convolutions, then 16 maps of 5x5 to 120, 84 and 10. 156 + 2416 + 48120 + 10164 + 850.
    ("lenet", (1, 28, 28), conv(1, 6, 5) + conv(6, 16, 5) + 401 * 120 + 121 * 84 + 85 * 10, 61_706),
    # Digits: 8 -> pool 4 -> padded convolution 4 -> pool 2, so 64 values reach the first layer.
    ("lenet", (1, 8, 8), 156 + 2416 + 65 * 120 + 121 * 84 + 85 * 10, 21_386),
    # 3x32x32: 32 -> 16 -> 12 -> 6, so 576 values.
    ("lenet", (3, 32, 32), conv(3, 6, 5) + 2416 + 577 * 120 + 121 * 84 + 85 * 10, 83_126),
    # The number that the FedAvg paper gives for its CNN.
    ("fedavg_cnn", (1, 28, 28), conv(1, 32, 5) + conv(32, 64, 5) + 3137 * 512 + 513 * 10, 1_663_370),
    # And for its 2NN: 784 to 200, 200 and 10.
    ("mlp", (1, 28, 28), 785 * 200 + 201 * 200 + 201 * 10, 199_210),
    ("resnet8", (3, 32, 32), 432 + 32 + block(16, 16) + block(16, 32) + block(32, 64) + 650, 78_042),
    (
        "resnet18",
        (3, 32, 32),
        conv(3, 64, 3, False)
        + 2 * 64
        + sum(block(i, o) + block(o, o) for i, o in [(64, 64), (64, 128), (128, 256), (256, 512)])
        + 5130,
        11_173_962,
    ),
    (
        "resnet34",
        (3, 32, 32),
        conv(3, 64, 3, False)
        + 2 * 64
        + sum(
            block(i, o) + (n - 1) * block(o, o) for i, o, n in [(64, 64, 3), (64, 128, 4), (128, 256, 6), (256, 512, 3)]
        )
        + 5130,
        21_282_122,
    ),
    # 32 -> 16 -> 8 -> 4, so 256 maps of 4x4.
    (
        "alexnet",
        (3, 32, 32),
        conv(3, 64, 3)
        + conv(64, 192, 5)
        + conv(192, 384, 3)
        + conv(384, 256, 3)
        + conv(256, 256, 3)
        + 4097 * 4096
        + 4097 * 4096
        + 4097 * 10,
        36_051_786,
    ),
    # 128 samples: 64 after the first pooling, 32 after the second, of 8 channels; 128 + 648 + 2570.
    ("ecg_cnn", (1, 128), 16 * 7 + 16 + 8 * 16 * 5 + 8 + 257 * 10, 3_346),
    ("vgg11", (3, 32, 32), vgg([3, 64, 128, 256, 256, 512, 512, 512, 512]) + 5130, 9_231_114),
]


@pytest.mark.parametrize(("name", "shape", "by_hand", "total"), COUNTS)
def test_parameter_count(name: str, shape: tuple[int, ...], by_hand: int, total: int) -> None:
    assert by_hand == total
    assert parameters(build(name, shape, 10, seed=0)) == total


@pytest.mark.parametrize(
    ("name", "total"), [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("alexnet", 61_100_840)]
)
def test_with_the_large_stem_it_is_the_papers_network(name: str, total: int) -> None:
    """Counts of weights for images of 224x224 and 1000 classes are those of the usual implementations."""
    with torch.device("meta"):
        model = build(name, (3, 224, 224), 1000, seed=0, stem="large")
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert parameters(model) == total
    smallest = {"alexnet": 63}.get(name, 32)
    assert build(name, (1, smallest, smallest), 2, seed=0, stem="large")(
        torch.rand(2, 1, smallest, smallest)
    ).shape == (2, 2)
    with pytest.raises(InvalidInput, match=f"height and width of at least {smallest}$"):
        build(name, (1, smallest, smallest - 1), 2, seed=0, stem="large")


@pytest.mark.parametrize("name", NAMES)
def test_cuts_are_submodules_in_the_order_they_run(name: str) -> None:
    model = build(name, shape_of(name), 10, seed=0)
    modules = dict(model.named_modules())
    assert model.cuts
    finished: list[str] = []
    for cut in model.cuts:
        modules[cut].register_forward_hook(lambda *_, cut=cut: finished.append(cut))
    model(torch.rand(2, *shape_of(name), generator=generator(0)))
    assert tuple(finished) == model.cuts
    assert list(modules)[-1] not in model.cuts  # nothing is left to run after the last layer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_tracing_changes_nothing(name: str, training: bool) -> None:
    model = build(name, shape_of(name), 10, seed=0).train(training)
    x = torch.rand(2, *shape_of(name), generator=generator(1))
    with stream(1):
        expected = model(x)
    with stream(1):
        assert torch.equal(fx.symbolic_trace(model)(x), expected)


def test_mlp_layers() -> None:
    model = build("mlp", (30,), 1, seed=0, hidden=[5, 4])
    assert [name for name, _ in model.named_children()] == ["flatten", "fc1", "relu1", "fc2", "relu2", "fc3"]
    assert model.cuts == ("fc1", "relu1", "fc2", "relu2")
    assert parameters(model) == 31 * 5 + 6 * 4 + 5 * 1
    linear = build("mlp", (30,), 1, seed=0, hidden=())
    assert (linear.cuts, parameters(linear)) == ((), 31)
    headed = build("mlp", (30,), 1, seed=0, hidden=[5, 4], identity_head=True)
    assert [name for name, _ in headed.named_children()][-2:] == ["fc3", "head"]
    assert headed.cuts == ("fc1", "relu1", "fc2", "relu2", "fc3")
    assert_same(headed.state_dict(), model.state_dict())


def test_lenet_pooling() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 0, 0] = 4.0
    average, greatest = (build("lenet", (1, 28, 28), 10, seed=0, pool=p).pool1 for p in ("average", "max"))
    assert float(average(x)[0, 0, 0, 0]) == 1.0
    assert float(greatest(x)[0, 0, 0, 0]) == 4.0


def test_a_block_adds_its_input() -> None:
    model = build("resnet8", (1, 8, 8), 2, seed=0)
    nn.init.zeros_(model.stage1.bn2.weight)
    x = torch.rand(2, 16, 8, 8, generator=generator(0)) - 0.5
    assert torch.equal(model.stage1(x), x.relu())


def test_the_seed_decides_and_the_global_generator_stays() -> None:
    before = torch.get_rng_state()
    first, again, other = (build("lenet", (1, 28, 28), 10, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["fc3.weight"], other["fc3.weight"])
    torch.manual_seed(derive(3, "initialization"))
    assert torch.equal(first["conv1.weight"], nn.Conv2d(1, 6, 5).weight)


def test_import_path() -> None:
    assert build("torch.nn:Linear", (3,), 2, seed=0, in_features=3, out_features=2).in_features == 3


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("lenet", {"pool": "mux"}, "unknown pool 'mux'; did you mean 'max'? (allowed: average, max)"),
    ("lenet", {"depth": 3}, "unknown parameter of model 'lenet': 'depth' (allowed: pool)"),
    ("resnet18", {"stem": "huge"}, "unknown stem of resnet18 'huge' (allowed: large, small)"),
    ("alexnet", {"dropout": 1.0}, "dropout=1.0 is not allowed; expected a number in [0, 1)"),
    ("mlp", {"hidden": [0]}, "hidden=0 is not allowed; expected a whole number of at least 1"),
]


@pytest.mark.parametrize(("name", "params", "text"), BAD)
def test_build_refuses(name: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        build(name, (3, 8, 8), 2, seed=0, **params)
    assert str(caught.value) == text


SMALLEST = {"lenet": 4, "fedavg_cnn": 4, "resnet8": 4, "resnet18": 8, "resnet34": 8, "alexnet": 8, "vgg11": 8}


@pytest.mark.parametrize("name", SMALLEST)
def test_shapes_refused(name: str) -> None:
    side = SMALLEST[name]
    assert build(name, (1, side, side), 2, seed=0)(torch.rand(2, 1, side, side)).shape == (2, 2)
    for shape in ((30,), (1, side, side - 1), (0, 28, 28)):
        with pytest.raises(InvalidInput) as caught:
            build(name, shape, 2, seed=0)
        assert str(caught.value) == (
            f"{name} cannot take rows of shape {shape}; expected (channels, height, width), "
            f"height and width of at least {side}"
        )
    with pytest.raises(InvalidInput, match=r"^outputs=0 is not allowed"):
        build(name, (1, 28, 28), 0, seed=0)


def test_mlp_shape_refused() -> None:
    for shape in ((), (3, 0)):
        with pytest.raises(InvalidInput, match=r"^mlp cannot take rows of shape .*; expected at least one"):
            build("mlp", shape, 2, seed=0)


def test_a_function_keeps_its_name_when_its_file_is_imported() -> None:
    for name in NAMES:
        assert inspect.unwrap(getattr(splitfed.models, name)) is registry.load("models", name)
        assert name in dir(splitfed.models)
    with pytest.raises(AttributeError, match=r"^module 'splitfed.models' has no attribute 'lexnet'$"):
        splitfed.models.lexnet  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_a_builder_draws_the_same_weights_whatever_was_drawn_before(name: str) -> None:
    make, shape = getattr(splitfed.models, name), shape_of(name)
    with stream(1):
        first = make(shape, 10)
        drawn = torch.rand(3)
    with stream(2):
        again, third = make(shape, 10, seed=0), make(shape, 10, seed=3)
        own = make(shape, 10, seed=None)
    assert_same(again.state_dict(), first.state_dict())
    assert_same(third.state_dict(), build(name, shape, 10, seed=3).state_dict())
    with stream(1):
        assert torch.equal(torch.rand(3), drawn), "torch's own generator is where it was"
    with stream(2):
        assert_same(make(shape, 10, seed=None).state_dict(), own.state_dict())
    weights = [next(m.parameters()) for m in (first, third, own)]
    assert not any(torch.equal(a, b) for a, b in combinations(weights, 2))


@pytest.mark.parametrize("seed", [-1, 0.5, True, "0"])
def test_seeds_that_are_none_are_refused(seed: Any) -> None:
    text = f"seed={seed!r} is not allowed; expected a whole number of at least 0"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        splitfed.models.lenet((1, 8, 8), 10, seed=seed)


def test_a_factory_of_the_users_own_gets_the_seed_where_it_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "seeded_models.py").write_text(
        "from torch import nn\ndef made(outputs, seed=9):\n    return nn.Sequential(nn.Linear(seed, outputs))\n"
    )
    name = "seeded_models:made"
    model = make(name, NameResolver(tmp_path).load("models", name), (5,), 2, 7, {})
    assert model[0].in_features == 7  # type: ignore[index]


def test_a_model_larger_than_the_machine_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    making = import_module("splitfed.models.build")
    assert making._memory() > 2**28
    monkeypatch.setattr(making, "_memory", lambda: 10**6)
    with pytest.raises(InvalidInput, match=r"model 'mlp' has weights of 0\.0015 GB; this machine has 0\.001 GB"):
        build("mlp", (1, 8, 8), 10, 0, hidden=[5000])
    build("mlp", (1, 8, 8), 10, 0, hidden=[500])


def test_a_model_that_cannot_be_measured_beforehand_is_told_and_made() -> None:
    """A plug-in's: what reads a number works when it is made, and not on tensors without numbers."""

    def reads(width: int) -> nn.Module:
        return nn.Linear(int(torch.full((1,), width).sum()), 1)

    text = (
        r"^model 'plugged' is not compared with this machine's memory: .* \((RuntimeError|NotImplementedError): .*meta"
    )
    with pytest.warns(UserWarning, match=text):
        assert make("plugged", reads, (5,), 1, 0, {"width": 5000}).in_features == 5000  # type: ignore[comparison-overlap]
    make("plugged", reads, (5,), 1, 0, {"width": 50})
