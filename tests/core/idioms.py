"""Runs what is in the tables of ways to write a model: trains it cut and uncut, and looks at what a cut left behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.replay import ReplayedSegment
from splitfed.core.topology import Topology
from splitfed.topologies import u_shaped, vanilla
from tests.core.cut_idioms import COUNTS
from tests.examples import engine_of

TRACES_LESS = [int(part) for part in torch.__version__.split(".")[:2]] < [2, 13]
"""An older torch cannot trace all that a newer one does; there it is replayed."""
DECAY = Optim("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})


@dataclass(frozen=True)
class Idiom:
    """A model, where it is cut, and the text of the refusal (None: it is exact).

    `shape`: of a row; `words`: it reads whole numbers; `draws`: it draws random numbers; `rounds`: gradients of one
    value are added up in part behind the cut, so that the last digits are others than in the uncut model. `replayed`:
    its segments replay `forward`, for a trace does not show what it does. `sent`: inputs that may cross as they are.
    """

    model: Callable[[], nn.Module]
    refused: str | None = None
    at: tuple[str, ...] = ("a", "b")
    draws: bool = False
    words: bool = False
    shape: tuple[int, ...] = (8,)
    rounds: bool = False
    replayed: bool = False
    sent: tuple[str, ...] = ()


def rows(idiom: Idiom, count: int) -> Tensor:
    """Return rows that the model takes."""
    drawn = torch.Generator().manual_seed(5)
    if idiom.words:
        return torch.randint(0, 16, (count, 5), generator=drawn)
    return torch.randn(count, *idiom.shape, generator=drawn)


def build(idiom: Idiom) -> nn.Module:
    """Return the model, from the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return idiom.model()


def topology_of(idiom: Idiom, model: nn.Module, x: Tensor) -> Topology:
    """Cut the model for a client and a server: vanilla after one submodule, U-shaped after two."""
    if len(idiom.at) == 2:
        return u_shaped(model, idiom.at, example=x, sent_inputs=idiom.sent or None)
    return vanilla(model, idiom.at[0], example=x, sent_inputs=idiom.sent or None)


def check_training(idiom: Idiom) -> None:
    """Hold that the parts train to the weights that the uncut model is trained to, under names that it loads."""
    model = build(idiom)
    x, y = rows(idiom, 24), torch.arange(24) % 4
    with left_alone(model):
        topology = topology_of(idiom, model, x)
    replayed = [isinstance(segment.module, ReplayedSegment) for segment in topology.segments]
    assert replayed == [idiom.replayed] * len(replayed) or (all(replayed) and TRACES_LESS)
    if idiom.draws:
        return  # Parties draw from streams of their own, so that the bits of a run are others.
    uncut = build(idiom)
    engine = engine_of(topology, x, y, optim=DECAY)
    steps = [chosen for _ in range(3) for chosen in torch.arange(24).split(8)]
    engine.train(0, 0, steps)
    train(uncut, x, y, steps)
    state = topology.state_dict(engine.modules(0))
    assert state.keys() == uncut.state_dict().keys()
    for key, value in uncut.state_dict().items():
        # Nine steps of sums of five numbers below 1, each off by a unit in the last place.
        near = 9 * 5 * torch.finfo(torch.float32).eps if idiom.rounds else 0.0
        torch.testing.assert_close(state[key], value, rtol=0, atol=near, msg=key)
    build(idiom).load_state_dict(state, strict=True)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: list[Tensor]) -> None:
    """Train `model` as anybody would, with what was frozen left frozen."""
    still = [n for n, m in model.named_modules() if model.training and not m.training]
    model.train()
    for name in still:
        model.get_submodule(name).training = False
    optimizer, _ = DECAY.build([p for p in model.parameters() if p.requires_grad])
    for chosen in steps:
        optimizer.zero_grad()
        functional.cross_entropy(logits(model(x[chosen])), y[chosen]).backward()
        optimizer.step()


def logits(output: Any) -> Tensor:
    """Return the one tensor of what a model returned."""
    if isinstance(output, Tensor):
        return output
    if is_dataclass(output):
        output = {f.name: getattr(output, f.name) for f in fields(output)}
    (found,) = (t for t in (output.values() if isinstance(output, dict) else output) if t is not None)
    return found


@contextlib.contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """Hold that the block leaves the model, its attributes, modes and hooks, and torch's generator as they were."""

    def attributes() -> dict[str, dict[str, int]]:
        known = vars(nn.Module())
        return {n: {k: id(v) for k, v in vars(m).items() if k not in known} for n, m in model.named_modules()}

    def hooks() -> dict[str, dict[str, list[int]]]:
        tables = [k for k in vars(nn.Module()) if "hooks" in k]
        return {n: {k: list(map(id, vars(m)[k].values())) for k in tables} for n, m in model.named_modules()}

    state = copy.deepcopy(model.state_dict())
    plain, hooked = attributes(), hooks()
    modes = {n: m.training for n, m in model.named_modules()}
    drawn, calls = torch.get_rng_state(), dict(COUNTS)
    yield
    assert torch.equal(torch.get_rng_state(), drawn)
    assert calls == COUNTS
    assert torch.is_grad_enabled()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items() if isinstance(v, Tensor))
    assert all(p.grad is None for p in model.parameters())
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert attributes() == plain
    assert hooks() == hooked


def check_left_alone(idiom: Idiom) -> None:
    """Hold that a cut, or its refusal, leaves the user's model as it was."""
    model = build(idiom)
    with left_alone(model), contextlib.suppress(InvalidInput):
        cut(model, idiom.at, rows(idiom, 8))
