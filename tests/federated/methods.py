"""What the tests of federated methods share: tiny runs on whole and split models, their plans, a bare walk by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules import Independent, SplitFedV1
from splitfed.schedules.base import Training
from splitfed.topologies import local, u_shaped, vanilla
from tests.examples import assert_same
from tests.federated.examples import EXAMPLE_PASSES, shared_probes
from tests.object_graph import holdings

BUILDERS = {
    "local": lambda m: local(m, ("relu1",)),
    "vanilla": lambda m: vanilla(m, "relu1"),
    "u_shaped": lambda m: u_shaped(m, ("relu1", "relu2")),
}


def net(seed: int = 0, widths: tuple[int, ...] = (10, 6)) -> nn.Module:
    with stream(seed):
        return mlp((1, 8, 8), 10, widths, seed=None)


@cache
def built(shape: str) -> Topology:
    """The topology of this shape that all runs share; they train copies of it."""
    return BUILDERS[shape](net())


@cache
def data(clients: int = 3, rows: int = 240) -> Any:
    return sf.data.digits().rows(range(rows)).clients(clients, dirichlet=0.5, auxiliary=10, victims=8)


def plan_of(shape: str, **changes: Any) -> Any:
    """Return the schedule for whole models or the one for split ones, with the same parameters."""
    return Independent(**changes) if shape == "local" else SplitFedV1(**changes)


def go(shape: str, method: Any, rounds: int = 2, **changes: Any) -> sf.Run:
    rows = changes.pop("data", None) or data()
    topology = changes.pop("topology", None) or built(shape)
    changes.setdefault("schedule", plan_of(shape))
    changes.setdefault("batch_size", 16)
    with shared_probes():
        return sf.train(topology, rows, method=method, rounds=rounds, **changes)


def planned(shape: str, method: Any, rounds: int = 2, **changes: Any) -> Any:
    rows = changes.pop("data", None) or data()
    topology = changes.pop("topology", None) or built(shape)
    plan = changes.pop("schedule", None) or plan_of(shape)
    fixed = {
        "defenses": changes.pop("defenses", ()),
        "optimizer": None,
        "training": Training(16),
        "method": method,
        "example_passes": EXAMPLE_PASSES,
    }
    return cost(prepare(topology, rows, schedule=plan, **fixed), rounds)


def counted(run: sf.Run) -> dict[Any, Any]:
    return {flow: found for flow, found in run.engine.traffic.flows.items() if flow.phase == "train"}


def weights(run: sf.Run, replica: int) -> dict[str, Tensor]:
    return {f"{n}/{k}": v for n, m in run.engine.modules(replica).items() for k, v in m.state_dict().items()}


def assert_plan_is_counted(shape: str, method: Any, rounds: int = 3, **changes: Any) -> sf.Run:
    run = go(shape, method, rounds, **changes)
    assert planned(shape, method, rounds, **changes).flows == counted(run)
    return run


def assert_resumes(shape: str, method: Any, folder: Path, **changes: Any) -> None:
    """Two rounds, a stop, two more: the same bits as four in one go."""

    def stop(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
        if done == 2:
            raise KeyboardInterrupt

    whole = go(shape, method, 4, **changes)
    with pytest.raises(KeyboardInterrupt):
        go(shape, method, 4, logging=sf.Logging(folder=folder, progress=stop), **changes)
    again = go(shape, method, 4, logging=sf.Logging(folder=folder, resume=True), **changes)
    for name, state in whole.state().items():
        if name.startswith("party-"):
            assert_same(state["segments"], again.state()[name]["segments"])
            assert_equal(state["objective"], again.state()[name]["objective"])
    assert_equal(whole.method_state, again.method_state)


def assert_nothing_held_twice(run: sf.Run) -> None:
    """No party of the run reaches an object that another one holds."""
    held = {name: holdings(party) for name, party in run.engine.parties.items()}
    assert [(a, b) for (a, one), (b, two) in combinations(held.items(), 2) if one & two] == []


def assert_mean_of_clients(run: sf.Run, mean: Mapping[str, Tensor], rows: Any) -> None:
    """`mean` is that of the clients' own weights of these names, weighted by their training rows."""
    sizes = [len(c.train) for c in rows.clients]
    for name, tensor in mean.items():
        parts = [n * weights(run, replica)[name].double() for replica, n in enumerate(sizes)]
        torch.testing.assert_close(tensor, (torch.stack(parts).sum(0) / sum(sizes)).to(tensor.dtype))


def assert_equal(one: Any, other: Any) -> None:
    """Compare states: tensors bit for bit, wherever they stand."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_equal(mine, its)
    else:
        assert one == other


class ByHand:
    """The segments of a topology as one model without parties: all values at once, one optimizer for all weights."""

    def __init__(self, topology: Topology, rate: float = 0.05, momentum: float = 0.9) -> None:
        self.segments = topology.segments
        self.modules = copy.deepcopy({s.name: s.module for s in topology.segments})
        self.inputs = tuple(topology.inputs)
        unique = {id(p): p for m in self.modules.values() for p in m.parameters()}
        self.optimizer = torch.optim.SGD(list(unique.values()), lr=rate, momentum=momentum)

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        made = dict.fromkeys(self.inputs, x)
        for s in self.segments:
            made[s.outputs[0]] = self.modules[s.name](*(made[v] for v in s.inputs))
        return made

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # the only other backward of these tests: the reference
        self.optimizer.step()

    def assert_as(self, run: sf.Run, replica: int = 0) -> None:
        found = run.engine.modules(replica)
        for name, module in self.modules.items():
            for key, tensor in module.state_dict().items():
                torch.testing.assert_close(found[name].state_dict()[key], tensor, rtol=1e-5, atol=1e-6)
