"""Trains a model of several inputs cut and uncut on the same batches, and compares the weights bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.example_pass import pass_example
from splitfed.core.module_copies import deep_copy
from splitfed.core.replay_plan import flatten_result
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from tests.core.idioms import DECAY, left_alone
from tests.examples import placed
from tests.predicted_bytes import step_bytes

CLASSES = 4


def built(make: Any, *given: Any, **named: Any) -> nn.Module:
    """Return what `make` builds, from the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made: nn.Module = make(*given, **named)
        return made


def check_trains_beside(
    model: nn.Module,
    topology: Topology,
    rows: Mapping[str, Tensor],
    size: int = 4,
    output: str | None = None,
    near: float = 0.0,
    call: Callable[[nn.Module, Mapping[str, Tensor]], Any] = lambda model, rows: model(**rows),
) -> None:
    """Hold that `topology` trains as `model` over batches of `size` of `rows`, in their order, twice.

    `output`: which result has the loss; `near`: by how much weights may differ; `call`: how the uncut model is called.
    What is sent has the bytes that were predicted.
    """
    count = len(next(iter(rows.values())))
    y, uncut = torch.arange(count) % CLASSES, deep_copy(model, (model,), {})
    topology = topology.with_task(classification(CLASSES))
    with left_alone(model):
        engine = placed(topology, rows, {head.value: y for head in topology.heads}, optim=DECAY)
        steps = [chosen for _ in range(2) for chosen in torch.arange(count).split(size)]
        engine.train(0, 0, steps)
    facts = pass_example(topology, {name: x[:2] for name, x in rows.items()})
    assert engine.traffic.bytes() == sum(step_bytes(topology, facts, len(chosen)) for chosen in steps)
    uncut.train()
    optimizer, _ = DECAY.build([p for p in uncut.parameters() if p.requires_grad])
    for chosen in steps:
        optimizer.zero_grad()
        (found,) = flatten_result(call(uncut, {name: x[chosen] for name, x in rows.items()}), output).values()
        functional.cross_entropy(found, y[chosen]).backward()
        optimizer.step()
    state = topology.state_dict(engine.modules(0))
    assert state.keys() == uncut.state_dict().keys()
    for name, value in uncut.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=near, msg=name)
