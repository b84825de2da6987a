"""Draws from NumPy's and Python's default generators: a party's own stream where one party draws, else refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.replay import ReplayedSegment
from splitfed.core.replay_passes import RecordingPass
from splitfed.engines.wire_format import ByteLink
from splitfed.topologies import vanilla
from tests.core.cut_idioms import Net
from tests.core.idioms import DECAY
from tests.examples import engine_of
from tests.thinning import thin


class MaskedSpans(nn.Module):
    """Hides a span of each row, as SpecAugment does: NumPy says where."""

    def forward(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        mask = np.zeros(tuple(h.shape), dtype=bool)
        for row, start in enumerate(np.random.randint(0, h.shape[1] - 2, h.shape[0])):  # noqa: NPY002
            mask[row, start : start + 2] = True
        return torch.where(torch.tensor(mask, device=h.device), 0.0, h)


class SkippedLayer(nn.Module):
    """Leaves its layer out at random, and its dropout draws from torch beside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, h: Tensor) -> Tensor:
        skipped = self.training and random.random() < 0.4
        return h if skipped else h + self.drop(self.fc(h))


class MixedRows(nn.Module):
    """Mixes rows by a share that NumPy draws."""

    def forward(self, h: Tensor) -> Tensor:
        share = float(np.random.beta(0.5, 0.5)) if self.training else 1.0  # noqa: NPY002
        return share * h + (1 - share) * h.flip(0)


def scaled(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * random.uniform(0.5, 1.5) if module.training else output


def hooked() -> nn.Module:
    """Return a net whose first layer draws in a hook, which a trace leaves where it is."""
    model = Net(lambda m, x: m.c(torch.relu(m.b(torch.relu(m.a(x))))))
    model.a.register_forward_hook(scaled)
    return model


def with_layer(layer: Callable[[], nn.Module], front: bool) -> Callable[[], nn.Module]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.a(x))
        h = m.b(m.layer(h) if front else h)
        return m.c(torch.relu(h if front else m.layer(h)))

    return lambda: Net(forward, layer=layer())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "spans_in_front": with_layer(MaskedSpans, front=True),
    "spans_behind": with_layer(MaskedSpans, front=False),
    "skipped_in_front": with_layer(SkippedLayer, front=True),
    "skipped_behind": with_layer(SkippedLayer, front=False),
    "mixed_in_front": with_layer(MixedRows, front=True),
    "both_ends": lambda: Net(
        lambda m, x: m.c(m.d(torch.relu(m.b(m.e(torch.relu(m.a(x))))))), d=MaskedSpans(), e=SkippedLayer()
    ),
    "hook_of_a_traced_layer": hooked,
}


def trained(make: Callable[[], nn.Module], seed: int, resumed: bool = False, **options: Any) -> dict[str, Tensor]:
    """Train for six batches, with the process's own generators at `seed`; stop and load in the middle if `resumed`."""
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 8, generator=drawn), torch.arange(24) % 4
    steps = list(torch.arange(24).split(8))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        topology = vanilla(make(), "b", example=x[:8])
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        engine = engine_of(topology, x, y, optim=DECAY, **options)
        before = random.getstate()
        engine.train(0, 0, steps)
        if resumed:
            states = {name: party.state.state_dict() for name, party in engine.parties.items()}
            engine = engine_of(topology, x, y, optim=DECAY, **options)
            for name, state in states.items():
                engine.parties[name].state.load_state_dict(state)
        engine.train(0, 1, steps)
        assert random.getstate() == before, "the process's own generators are left alone"
    return topology.state_dict(engine.modules(0))


@pytest.mark.parametrize("name", thin(MODELS, 4))
def test_a_party_draws_from_its_own_stream(name: str) -> None:
    first = trained(MODELS[name], 0)
    others = [trained(MODELS[name], 1), trained(MODELS[name], 2, resumed=True), trained(MODELS[name], 3, link=ByteLink)]
    for other in others:
        assert all(torch.equal(value, other[key]) for key, value in first.items())


def test_a_trace_and_a_replay_are_both_among_them() -> None:
    cut = {n: vanilla(make(), "b", example=torch.randn(8, 8)) for n, make in MODELS.items()}
    replayed = {n for n, topology in cut.items() if isinstance(topology.segments[0].module, ReplayedSegment)}
    assert replayed == set(MODELS) - {"hook_of_a_traced_layer"}


def test_only_the_party_whose_submodule_draws_is_given_a_stream() -> None:
    x = torch.randn(8, 8)
    front = vanilla(MODELS["spans_in_front"](), "b", example=x)
    behind = vanilla(MODELS["spans_behind"](), "b", example=x)
    both = pass_example(vanilla(MODELS["both_ends"](), "b", example=x), {"x": x})
    assert pass_example(front, {"x": x}).plain_draws == {"bottom"}
    assert pass_example(behind, {"x": x}).plain_draws == {"top"}
    assert both.plain_draws == {"bottom", "top"}
    assert both.stochastic == {"bottom"}


def test_every_step_of_every_epoch_draws_others() -> None:
    x, drawn = torch.randn(24, 8), set()
    engine = engine_of(vanilla(MODELS["mixed_in_front"](), "b", example=x[:8]), x, torch.arange(24) % 4)
    (module,) = engine.parties["client0"].state.modules.values()
    layer = module.get_submodule("layer")
    layer.register_forward_pre_hook(lambda *_: drawn.add(np.random.get_state()[1].tobytes()))  # type: ignore[index]  # noqa: NPY002
    for epoch in range(2):
        engine.train(0, epoch, list(torch.arange(24).split(8)))
    assert len(drawn) == 6


def between_submodules(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.relu(m.b(torch.relu(m.a(x)) * float(np.random.rand()))))  # noqa: NPY002


def branch_between_submodules(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    return m.c(m.b(h * 2 if random.random() < 0.5 else h * 3))


@pytest.mark.parametrize(
    ("forward", "package"), [(between_submodules, "numpy.random"), (branch_between_submodules, "random")]
)
def test_draws_that_every_party_would_make_are_refused(forward: Callable[..., Tensor], package: str) -> None:
    with pytest.raises(InvalidInput, match=rf"other random numbers are drawn from {package}; draw within a submodule"):
        vanilla(Net(forward), "b", example=torch.randn(8, 8))


def test_a_function_of_torch_that_calls_another_may_draw_from_python() -> None:
    def draw(value: float) -> float:
        return value + random.random()

    with RecordingPass(nn.Linear(2, 2), [], []) as run:
        x = torch.zeros(3).relu()
        x.apply_(draw)
        functional.dropout(x, 0.5)
    drawn = {operation.name: operation.draws for operation in run.operations}
    assert drawn == {"zeros": set(), "relu": set(), "apply_": {"random"}, "dropout": {"torch"}}
