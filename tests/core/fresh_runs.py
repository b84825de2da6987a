"""Trains a model cut and uncut by `sf.train` and by a plain loop, for the rows of `tests/core/test_fresh_models.py`."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.step_state import forward_seed
from splitfed.core.topology import Topology
from splitfed.schedules.base import Training
from splitfed.topologies import u_shaped, vanilla
from tests.core.fresh_models_by_hand import SEEN
from tests.core.idioms import left_alone

TRAIN, TEST, SIZE, ROUNDS, SEED = 19, 5, 8, 3, 2
"""Batches of 8, 8 and 3 rows."""
OPTIM = Optim("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Fresh:
    """A model, the submodules it is cut behind (one: vanilla, two: U-shaped), its rows, and what must come of it.

    `refused`: a text that the refusal contains (None: trained to the bits of the uncut model). `draws`: it draws random
    numbers, so that the reference draws from the streams of the parties. `near`: gradients of one value are added up in
    parts, so that last digits are others. `output`, `sent`: as for `vanilla`. `slow`: takes longer than a second.
    """

    model: Callable[[], nn.Module]
    at: tuple[str, ...]
    inputs: Callable[[int], Rows]
    refused: str | None = None
    draws: bool = False
    near: bool = False
    output: str | None = None
    sent: tuple[str, ...] | None = None
    slow: bool = False


def build(fresh: Fresh) -> nn.Module:
    """Return the model, from the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return fresh.model()


def topology_of(fresh: Fresh, model: nn.Module) -> Topology:
    """Cut the model, with eight rows as an example."""
    rows = fresh.inputs(SIZE)
    example: Any = rows if len(rows) > 1 else next(iter(rows.values()))
    rest: dict[str, Any] = {"example": example, "output": fresh.output, "sent_inputs": fresh.sent}
    return u_shaped(model, fresh.at, **rest) if len(fresh.at) == 2 else vanilla(model, fresh.at[0], **rest)


def data_of(fresh: Fresh) -> sf.Federation:
    """Return the rows as those of one client."""
    rows, labels = fresh.inputs(TRAIN + TEST), torch.arange(TRAIN + TEST) % 4
    whole = "float32" if next(iter(rows.values())).is_floating_point() else "int64"
    given: Any = rows if len(rows) > 1 else next(iter(rows.values()))
    data = sf.data.from_arrays(given, labels, task=sf.classification(4), dtype=whole)  # type: ignore[arg-type]
    return data.clients(1, auxiliary=0, victims=0, validation=0.0, test=TEST / (TRAIN + TEST), seed=0)


def train_split(fresh: Fresh, model: nn.Module) -> sf.Run:
    """Cut and train, scored at the end alone."""
    seldom = sf.Evaluation(every=ROUNDS)
    topology, data = topology_of(fresh, model), data_of(fresh)
    return sf.train(topology, data, rounds=ROUNDS, batch_size=SIZE, optimizer=OPTIM, seed=SEED, evaluation=seldom)


def train_whole(fresh: Fresh, model: nn.Module, positions: Tensor) -> None:
    """Train the uncut model as anybody would, on the same rows in the same order."""
    rows, labels = fresh.inputs(TRAIN + TEST), torch.arange(TRAIN + TEST) % 4
    order = Training.of(sf.LocalUpdate(), SIZE, SEED)
    model.train()
    optimizer, _ = OPTIM.build([p for p in model.parameters() if p.requires_grad])
    for epoch in range(ROUNDS):
        batches = order.batches(len(positions), epoch, 0)
        assert sorted(torch.cat(batches).tolist()) == list(range(TRAIN))
        assert [len(b) for b in batches] == [8, 8, 3]
        for step, batch in enumerate(batches):
            chosen = positions[batch]
            optimizer.zero_grad()
            with streams_of_parties(fresh, model, Stamp("train", 0, epoch, step)):
                output = model(**{name: part[chosen] for name, part in rows.items()})
            functional.cross_entropy(logits(output), labels[chosen]).backward()
            optimizer.step()


@contextlib.contextmanager
def streams_of_parties(fresh: Fresh, model: nn.Module, stamp: Stamp) -> Iterator[None]:
    """Let what comes before the cut draw from the client's stream, and what comes behind from the server's."""
    if not fresh.draws:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(stream(forward_seed(SEED, "client0", "bottom", stamp), everywhere=True))

        def changed(module: nn.Module, inputs: Any, output: Any) -> None:
            stack.enter_context(stream(forward_seed(SEED, "server", "top", stamp), everywhere=True))

        (at,) = fresh.at
        hook = model.get_submodule(at).register_forward_hook(changed)
        yield
        hook.remove()


def logits(output: Any) -> Tensor:
    """Return the scores among what a model returned."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits  # type: ignore[no-any-return]
    return output[0]  # type: ignore[no-any-return]


def described(value: Any, depth: int = 0) -> Any:
    """Return what a value holds, in a form that compares by contents."""
    if isinstance(value, Tensor):
        return (value.dtype, value.tolist())
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if inspect.isgenerator(value):
        return (inspect.getgeneratorstate(value), dict(inspect.getgeneratorlocals(value)))
    if isinstance(value, nn.Module) or depth > 4:
        return id(value)
    if isinstance(value, Mapping):
        return {str(k): described(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [described(v, depth + 1) for v in value]
    if is_dataclass(value):
        return {f.name: described(getattr(value, f.name), depth + 1) for f in fields(value)}
    return repr(value)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Hold that the block leaves the model, what it refers to, and all generators of random numbers as they were."""

    def everything() -> Any:
        known = vars(nn.Module())
        plain = {n: {k: described(v) for k, v in vars(m).items() if k not in known} for n, m in model.named_modules()}
        return plain, dict(SEEN), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = everything()
    with left_alone(model):
        yield
    assert everything() == before


def check(fresh: Fresh) -> None:
    """Hold that a row is exact or refused, as it says, and that nothing of the user's is changed."""
    model = build(fresh)
    uncut = build(fresh)
    if fresh.refused is not None:
        with untouched(model), pytest.raises(InvalidInput) as caught:
            train_split(fresh, model)
        assert "\n" not in str(caught.value)
        assert fresh.refused in str(caught.value)
        return
    with untouched(model):
        run = train_split(fresh, model)
    data = data_of(fresh)
    train_whole(fresh, uncut, data.sources["client0/train"])
    state = run.export(build(fresh)).state_dict()
    assert state.keys() == uncut.state_dict().keys()
    for key, value in uncut.state_dict().items():
        # Nine steps of sums of five numbers below 1, each off by a unit in the last place.
        near = 9 * 5 * torch.finfo(torch.float32).eps if fresh.near else 0.0
        torch.testing.assert_close(state[key], value, rtol=0, atol=near, msg=key)
    rows, tested = fresh.inputs(TRAIN + TEST), data.sources["client0/test"]
    with torch.no_grad():
        expected = logits(uncut.eval()(**{name: part[tested] for name, part in rows.items()}))
    torch.testing.assert_close(run.predict(data.clients[0].test.x), expected, rtol=0, atol=1e-5 if fresh.near else 0.0)
