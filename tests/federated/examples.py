"""Worlds for federated methods: one weight and constant labels, to work out by hand; small images with batch norm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.local_update import LocalUpdate
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.tasks import regression
from splitfed.core.topology import Topology
from splitfed.data.dataset import ClientData, Dataset, Federation
from splitfed.federated import Method, MethodTraits
from splitfed.planning import validation
from splitfed.planning.example_passes import ExamplePasses
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.topologies import local
from splitfed.training.run import Run
from tests.examples import assert_same, toy_data

START = 2.0
RATE = 0.1
CLIENTS = ((3, 1.0), (1, -3.0))
"""Rows and label of each client; x is 1, so that the loss is (w - label)^2 and its gradient 2 (w - label)."""


def constants(clients: Sequence[tuple[int, float]] = CLIENTS) -> Federation:
    """Every client has rows of x = 1 and one label, and two test rows, one above and one below it."""
    held = [constant(rows, label) for rows, label in clients]
    tests = [constant(1, label - 1).join([constant(1, label + 1)]) for _, label in clients]
    everybody = held[0].join(held[1:])
    parts = [
        ClientData(f"client{i}", rows, rows.rows([]), test)
        for i, (rows, test) in enumerate(zip(held, tests, strict=True))
    ]
    return Federation("constants", everybody.task, tuple(parts), everybody.rows([]), everybody.rows([0]), {})


def constant(rows: int, label: float) -> Dataset:
    return Dataset("constant", torch.ones(rows, 1), torch.full((rows,), label), regression(1))


def scalar(start: float = START) -> Topology:
    """One weight that multiplies x."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return local(model)


def hand(method: Any, rounds: int = 1, clients: Sequence[tuple[int, float]] = CLIENTS, **changes: Any) -> Run:
    """Train one weight on constants: batches of one row, plain SGD at `RATE`."""
    settings = {"schedule": "independent", "batch_size": 1, "optimizer": Optim("SGD", {"lr": RATE}), **changes}
    return splitfed.train(scalar(), constants(clients), method=method, rounds=rounds, **settings)


def own(run: Run, replica: int, segment: str = "model") -> float:
    """The weight that a client holds."""
    return float(run.engine.modules(replica)[segment].weight.detach())


def common(run: Run, name: str = "model/weight") -> float:
    """The weight that the aggregation server holds."""
    return float(run.method_state["weights"][name])


def model(seed: int = 0, width: int = 8) -> nn.Module:
    """Two pieces, cut after "relu", with batch norm in the first."""
    with stream(seed):
        return nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                fc1=nn.Linear(64, width),
                norm=nn.BatchNorm1d(width),
                relu=nn.ReLU(),
                fc2=nn.Linear(width, 10),
            )
        )


@cache
def whole() -> Topology:
    """That model, which nobody cuts; one for all runs, which train copies of it."""
    return local(model(), ("relu",))


@cache
def pictures(clients: int = 3) -> Federation:
    return toy_data(150).clients(clients, dirichlet=1.0, minimum=12, auxiliary=8, victims=6, seed=1)


EXAMPLE_PASSES = ExamplePasses()
"""What runs of one topology on the same rows have found out about them: no second run compares it with its model."""


@contextmanager
def shared_probes() -> Iterator[None]:
    """Let runs ask `EXAMPLE_PASSES`, as those of a study ask its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "ExamplePasses", lambda: EXAMPLE_PASSES)
        yield


def arguments(**changes: Any) -> dict[str, Any]:
    """Those of `splitfed.train` and `prepare` for small images."""
    return {
        "topology": whole(),
        "data": pictures(),
        "schedule": "independent",
        "optimizer": Optim("SGD", {"lr": 0.1}),
        **changes,
    }


def traits(method: Method) -> MethodTraits:
    """What `method` is on whole models of small images."""
    given = {"defenses": (), "training": Training(7), **arguments()}
    return method.traits(prepare(**given, method=method, example_passes=EXAMPLE_PASSES).topology)


def go(method: Any, rounds: int = 2, **changes: Any) -> Run:
    given = arguments(**changes)
    with shared_probes():
        return splitfed.train(
            given.pop("topology"), given.pop("data"), method=method, rounds=rounds, **{"batch_size": 7, **given}
        )


def weights(run: Run, replica: int) -> dict[str, Tensor]:
    """What `replica` holds, as `segment/name` -> tensor."""
    return {f"{n}/{k}": v for n, m in run.engine.modules(replica).items() for k, v in m.state_dict().items()}


def check_planned(run: Run, method: Any, **changes: Any) -> None:
    """Planned messages and bytes are those counted."""
    given = arguments(**changes)
    names = ("topology", "data", "schedule", "optimizer")
    training = Training.of(given.pop("local", LocalUpdate()), given.pop("batch_size", 7))
    defenses = given.pop("defenses", ())
    fixed = {"defenses": defenses, "training": training, "method": method, "example_passes": EXAMPLE_PASSES}
    ready = prepare(**{n: given[n] for n in names}, **fixed)
    counted = {flow: found for flow, found in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert cost(ready, len(run.history)).flows == counted


def check_resumed(whole: Run, method: Any, folder: Path, **changes: Any) -> None:
    """A run of as many rounds, stopped after the second and resumed, ends in the same bits; `method` may be None."""

    def stop(done: int, rounds: int, metrics: Any) -> None:
        if done == 2:
            raise KeyboardInterrupt

    rounds = len(whole.history)
    try:
        go(method, rounds, logging=splitfed.Logging(folder=folder, progress=stop), **changes)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the run was not stopped")
    again = go(method, rounds, logging=splitfed.Logging(folder=folder, resume=True), **changes)
    one, two = whole.state(), again.state()
    assert one.keys() == two.keys()
    for name in one:
        if name.startswith("party-"):
            assert_same(one[name], two[name], name)
    for name in ("method", "schedule"):
        assert_same(one["run"].get(name), two["run"].get(name), name)
    assert whole.history[-1]["test"] == again.history[-1]["test"]
