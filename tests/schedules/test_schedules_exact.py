"""Schedules against plain training: the same bits with one client, the same numbers to round-off with several."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.example_pass import pass_example
from splitfed.core.optimizers import Optim
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.data.batch_order import batches
from splitfed.engines.local import LocalEngine
from splitfed.models.lenet import lenet
from splitfed.schedules.alternate import Alternate
from splitfed.schedules.base import Schedule, Training
from splitfed.schedules.blind import Blind
from splitfed.schedules.joint import Joint
from splitfed.schedules.local_loss import LocalLoss
from splitfed.schedules.sequential import Sequential
from splitfed.schedules.sglr import Sglr
from splitfed.schedules.splitfed_v1 import SplitFedV1
from splitfed.schedules.splitfed_v2 import SplitFedV2
from splitfed.schedules.splitfed_v3 import SplitFedV3
from splitfed.topologies import u_shaped, vanilla
from tests.examples import SmallUNet, assert_same, engine_of, images

PLAIN = [
    *(Sequential(), Alternate(), Joint(), SplitFedV1(), SplitFedV2(), SplitFedV3()),
    *(Blind(), Blind(average=True), Sglr(), Sequential(hand_over="none"), Alternate(hand_over="server")),
]
MOMENTUM = Optim("SGD", {"lr": 0.05, "momentum": 0.9})


def seeded(make: object, seed: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = make()  # type: ignore[operator]
    return model


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def trained(
    topology: Topology,
    x: Tensor,
    y: Tensor,
    plan: Schedule,
    training: Training,
    replicas: int,
    rounds: int,
    optim: Optim,
) -> LocalEngine:
    ready = topology.with_task(classification(10))
    name = next(iter(ready.inputs))
    ready = plan.prepare(ready, pass_example(ready, {name: x[:4]}), 0)
    plan.check(ready, replicas)
    engine = engine_of(ready, x, y, replicas=replicas, optim=optim, placement=plan.placement(ready))
    state = plan.start(replicas)
    for number in range(rounds):
        plan.round(engine, training, number, state)
        engine.end_round()
    return engine


def state_of(engine: LocalEngine, plan: Schedule, client: int = 0) -> dict[str, Tensor]:
    """The whole model as `client` would use it after training."""
    return engine.topology.state_dict(engine.modules(client, plan.newest(client, {"newest": 0})))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("shape", ["vanilla lenet", "u_shaped unet"])
@pytest.mark.parametrize("plan", PLAIN, ids=repr)
def test_one_client_is_plain_training_bit_for_bit(plan: Schedule, shape: str) -> None:
    x, y = images(40)
    make = SmallUNet if "unet" in shape else lambda: lenet((1, 8, 8), 10)
    uncut = seeded(make)
    topology = vanilla(seeded(make), "pool1") if "lenet" in shape else u_shaped(seeded(make), ("pool1", "up2"))
    training = Training(16, local_epochs=2, seed=5)
    engine = trained(topology, x, y, plan, training, 1, 2, MOMENTUM)
    optimizer = torch.optim.SGD(uncut.train().parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        for rows in batches(40, 16, 5, epoch, 0):
            stepped(uncut, optimizer, x[rows], y[rows])
    assert_same(dict(state_of(engine, plan)), dict(uncut.state_dict()))


def test_local_loss_with_one_client_is_training_of_the_two_halves_apart() -> None:
    """The bottom learns from its auxiliary head, the top from the detached activations, bit for bit."""
    x, y = images(40)
    plan, training = LocalLoss(), Training(16, local_epochs=1, seed=5)
    topology = vanilla(seeded(lambda: lenet((1, 8, 8), 10)), "pool1")
    engine = trained(topology, x, y, plan, training, 1, 2, MOMENTUM)
    model = seeded(lambda: lenet((1, 8, 8), 10))
    cut = vanilla(model, "pool1")
    bottom, top = (s.module for s in cut.segments)
    fresh = plan.prepare(cut.with_task(classification(10)), engine.facts, 0)
    aux = copy.deepcopy(fresh.segment("auxiliary_bottom").module)
    client = torch.optim.SGD([*bottom.parameters(), *aux.parameters()], lr=0.05, momentum=0.9)
    server = torch.optim.SGD(top.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        for rows in batches(40, 16, 5, epoch, 0):
            z = bottom(x[rows])
            client.zero_grad()
            server.zero_grad()
            functional.cross_entropy(aux(z), y[rows]).backward()
            functional.cross_entropy(top(z.detach()), y[rows]).backward()
            client.step()
            server.step()
    found = engine.modules(0, plan.newest(0, {}))
    assert_same(dict(found["bottom"].state_dict()), dict(bottom.state_dict()))
    assert_same(dict(found["top"].state_dict()), dict(top.state_dict()))
    assert_same(dict(found["auxiliary_bottom"].state_dict()), dict(aux.state_dict()))
    assert engine.traffic.bytes(kind="gradient") == 0


def doubles(rows: int) -> tuple[Tensor, Tensor]:
    x, y = images(rows)
    return x.double(), y


def close(found: dict[str, Tensor], model: nn.Module) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-13, msg=name)


def fedavg(
    model: nn.Module, shards: Sequence[tuple[Tensor, Tensor]], rounds: int, steps: int, rate: float
) -> nn.Module:
    """Federated averaging with full batches, weighted by examples, written out."""
    total = sum(len(y) for _, y in shards)
    for _ in range(rounds):
        local = [copy.deepcopy(model) for _ in shards]
        for mine, (x, y) in zip(local, shards, strict=True):
            optimizer = torch.optim.SGD(mine.parameters(), lr=rate)
            for _ in range(steps):
                stepped(mine, optimizer, x, y)
        parts = [dict(m.named_parameters()) for m in local]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                terms = [p[name] * len(y) / total for p, (_, y) in zip(parts, shards, strict=True)]
                parameter.copy_(torch.stack(terms).sum(0))
    return model


@pytest.mark.parametrize("rows", [48, 50], ids=["equal shards", "unequal shards"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_splitfed_v1_is_federated_averaging_of_the_uncut_model(epochs: int, rows: int) -> None:
    x, y = doubles(rows)
    plan = SplitFedV1()
    topology = vanilla(seeded(small).double(), "1")
    engine = trained(topology, x, y, plan, Training(100, local_epochs=epochs), 4, 3, Optim("SGD", {"lr": 0.3}))
    shards = list(zip(x.chunk(4), y.chunk(4), strict=True))
    reference = fedavg(seeded(small).double(), shards, 3, epochs, 0.3)
    for client in range(4):
        close(state_of(engine, plan, client), reference)


@pytest.mark.parametrize("plan", [SplitFedV1(), Blind(average=True)], ids=repr)
def test_one_full_step_a_round_is_centralised_training_on_the_union(plan: Schedule) -> None:
    x, y = doubles(48)
    topology = vanilla(seeded(small).double(), "1")
    engine = trained(topology, x, y, plan, Training(100), 4, 5, Optim("SGD", {"lr": 0.3}))
    reference = seeded(small).double()
    if isinstance(plan, Blind):
        # The clients' parts of the common gradient are 1/4 of their own; their mean moves 1/4 as far again.
        reference = centralised(reference, x, y, 5, {"1": 0.3 / 4, "3": 0.3})
    else:
        reference = centralised(reference, x, y, 5, {"1": 0.3, "3": 0.3})
    close(state_of(engine, plan), reference)


def centralised(model: nn.Module, x: Tensor, y: Tensor, steps: int, rates: dict[str, float]) -> nn.Module:
    modules = dict(model.named_modules())
    groups = [{"params": list(modules[name].parameters()), "lr": rate} for name, rate in rates.items()]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    for _ in range(steps):
        stepped(model, optimizer, x, y)
    return model


@pytest.mark.parametrize("by_examples", [True, False])
def test_blind_is_one_step_on_the_average_of_the_losses(by_examples: bool) -> None:
    """Unequal shards, so that the two averages differ; clients keep bottoms of their own."""
    x, y = doubles(50)
    plan = Blind(by_examples=by_examples)
    engine = trained(vanilla(seeded(small).double(), "1"), x, y, plan, Training(100), 4, 3, Optim("SGD", {"lr": 0.3}))
    bottoms = [seeded(small).double()[:2] for _ in range(4)]
    top = seeded(small).double()[2:]
    shards = list(zip(x.chunk(4), y.chunk(4), strict=True))
    parameters = [p for m in (*bottoms, top) for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    for _ in range(3):
        losses = [functional.cross_entropy(top(b(a)), c) for b, (a, c) in zip(bottoms, shards, strict=True)]
        weights = [len(c) / 50 if by_examples else 1 / 4 for _, c in shards]
        optimizer.zero_grad()
        torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum().backward()
        optimizer.step()
    for client in range(4):
        whole = nn.Sequential(*bottoms[client], *top)
        close(state_of(engine, plan, client), whole)


def test_sglr_gives_the_drawn_clients_the_sum_and_the_server_its_rate() -> None:
    """phi = 1: every client's bottom moves by the sum of all clients' cut gradients through its own inputs."""
    x, y = doubles(48)
    plan = Sglr(phi=1.0, alpha=0.5)
    assert plan.rates(vanilla(small(), "1"), 4) == {"server": 2.0}
    engine = trained(vanilla(seeded(small).double(), "1"), x, y, plan, Training(100), 4, 1, Optim("SGD", {"lr": 0.3}))
    bottoms = [seeded(small).double()[:2] for _ in range(4)]
    top = seeded(small).double()[2:]
    order = [next(batches(12, 100, 0, 0, client)) for client in range(4)]
    parts = [b(a[rows]) for b, a, rows in zip(bottoms, x.chunk(4), order, strict=True)]
    leaf = torch.cat([p.detach() for p in parts]).requires_grad_()
    labels = torch.cat([c[rows] for c, rows in zip(y.chunk(4), order, strict=True)])
    functional.cross_entropy(top(leaf), labels).backward()
    assert leaf.grad is not None
    common = torch.stack(leaf.grad.chunk(4)).sum(0)
    for part in parts:
        part.backward(common)
    with torch.no_grad():
        for p in (p for m in (*bottoms, top) for p in m.parameters()):
            assert p.grad is not None
            p -= 0.3 * p.grad
    for client in range(4):
        close(state_of(engine, plan, client), nn.Sequential(*bottoms[client], *top))
