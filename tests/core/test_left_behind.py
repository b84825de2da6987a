"""What of a model no party runs is named in the refusal, and what only seemed to be so trains as in the uncut model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.schedules.base import Training
from splitfed.topologies import vanilla


class Layers(nn.Module):
    """Three layers, cut behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class HookedWeight(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight.register_hook(lambda gradient: gradient * 2)


class ReadGradient(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.c.bias.register_post_accumulate_grad_hook(lambda weight: None)


class HookedWhereItIsLarge(Layers):
    """No gradient of a comparison is as large as that."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6))


class Hooked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, returned: returned * 2)


class HookedInput(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


class Called(Layers):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 2


class OwnGenerator(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return self.c(self.b(h + torch.randn(h.shape, generator=self.draws)))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Any:
        return Twice.apply(weight)


class Parametrized(Layers):
    """What the refusal of a hook on a weight says to write in its place."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.b, "weight", Doubled())


class ComplexWeight(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return self.c((torch.relu(self.a(x)) * self.turn).abs())


class ScaledByDefault(Layers):
    """Its keyword has a number as default, which no party sends."""

    def forward(self, x: Tensor, *, scale: float = 0.5) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))) * scale)


class Observed(Layers):
    """A hook on the last layer is a method of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("high", torch.zeros(()))
        self.c.register_forward_pre_hook(self.observe)

    def observe(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.training:
            self.high.copy_(torch.maximum(self.high, given[0].detach().max()))
        return (given[0].clamp(max=self.high * 0.9),)


def made(kind: type[Layers]) -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


def data() -> sf.Federation:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    rows = sf.data.from_arrays(x, torch.arange(16) % 4, task=sf.classification(4))
    return rows.clients(1, auxiliary=0, victims=0, validation=0.0, test=0.25, seed=0)


def train(topology: sf.Topology) -> sf.Run:
    return sf.train(topology, data(), rounds=1, batch_size=6, seed=0, optimizer=sf.Optim("SGD", {"lr": 0.05}))


def by_hand(bottom: nn.Module) -> sf.Topology:
    segments = (
        sf.Segment("bottom", "client", bottom, ("x",), ("h",)),
        sf.Segment("top", "server", nn.Linear(8, 4), ("h",), ("y",)),
    )
    heads = (sf.Head("y", "server", "client"),)
    return sf.Topology(name="by hand", inputs={"x": "client"}, segments=segments, heads=heads)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (HookedWeight, r"weight 'b\.weight' of HookedWeight has a hook, .*clip_norm.*torch\.nn\.utils\.parametrize"),
        (HookedWhereItIsLarge, r"weight 'b\.weight' of HookedWhereItIsLarge has a hook"),
        (ReadGradient, r"weight 'c\.bias' of ReadGradient has a hook"),
        (Hooked, "Hooked itself has hooks, which no party runs: do in forward"),
        (HookedInput, "HookedInput itself has hooks, which no party runs: do in forward"),
        (Called, "Called itself has a __call__ of its own, which no party runs"),
        (OwnGenerator, r"'draws' of OwnGenerator is a torch\.Generator, .* draw without generator="),
    ],
)
def test_what_no_party_runs_is_named(kind: type[Layers], told: str) -> None:
    with pytest.raises(InvalidInput, match=told) as caught:
        vanilla(made(kind), "a", example=torch.randn(8, 8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("example", [None, torch.randn(8, 8)], ids=["trace", "example"])
def test_a_hook_put_on_a_weight_after_the_cut_is_refused_before_training(example: Tensor | None) -> None:
    model = made(Layers)
    topology = vanilla(model, "a", example=example)
    hook = model.b.weight.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6))
    with pytest.raises(InvalidInput, match=r"weight 'b\.weight' of segment 'top' has a hook"):
        train(topology)
    hook.remove()
    train(topology)


def test_a_hook_on_a_weight_of_a_segment_by_hand_is_refused() -> None:
    bottom = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    bottom[0].weight.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6))
    with pytest.raises(InvalidInput, match=r"weight '0\.weight' of segment 'bottom' has a hook, .*take the hook off"):
        by_hand(bottom)


@pytest.mark.parametrize("kind", [Parametrized, ComplexWeight, ScaledByDefault, Observed])
def test_what_a_party_runs_as_it_is_written_is_exact(kind: type[Layers]) -> None:
    run, plain = train(vanilla(made(kind), "a", example=torch.randn(8, 8))), made(kind)
    steps = torch.optim.SGD(plain.parameters(), lr=0.05)
    x, y = data().clients[0].train.x, data().clients[0].train.y
    for batch in Training.of(sf.LocalUpdate(), 6, 0).batches(len(x), 0, 0):
        steps.zero_grad()
        nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
        steps.step()
    for name, value in run.export(made(kind)).state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_a_pruned_layer_is_a_segment_by_hand() -> None:
    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    before = layer.weight_orig.detach().clone()
    run = train(by_hand(nn.Sequential(layer, nn.ReLU())))
    assert torch.equal(layer.weight_orig, before)
    (trained,) = (value for name, value in run.state_dict().items() if name.endswith("weight_orig"))
    kept = layer.weight_mask.bool()
    assert not torch.equal(trained[kept], before[kept])
    # What is pruned gets a gradient of zeros.
    assert torch.equal(trained[~kept], before[~kept])
