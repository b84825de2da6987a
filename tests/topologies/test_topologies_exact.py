"""Every builder trains to the same bits as the uncut model, or as the model written as one module.

Bits are equal wherever the reference adds in the executor's order, which is torch's own: the reverse of the order
things were made in. The one test that states a tolerance says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.example_pass import pass_example
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, stream
from splitfed.core.tasks import classification, regression
from splitfed.core.topology import Topology
from splitfed.engines.local import LocalEngine
from splitfed.models.mlp import mlp
from splitfed.models.resnet8 import resnet8
from splitfed.topologies import (
    Fusion,
    extended_vanilla,
    heterogeneous,
    multi_hop,
    multi_task,
    u_shaped,
    vertical,
)
from tests.examples import ManyTops, SmallUNet, Whole, block, columns, engine_of, images, placed
from tests.thinning import thin

STEPS, BATCH, ROWS = 50, 10, 100
OPTIMS = {
    "sgd": Optim("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}),
    "adam": Optim("Adam", {"lr": 1e-3}),
}
Losses = Callable[[Tensor], Sequence[Tensor]]

every_optim = pytest.mark.parametrize("optim", thin([pytest.param(one, id=name) for name, one in OPTIMS.items()], 2))


def order(rows: int = ROWS, steps: int = STEPS) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(1)
    epochs = -(-steps * BATCH // rows)
    return [t for _ in range(epochs) for t in torch.randperm(rows, generator=drawn).split(BATCH)][:steps]


def reference(model: nn.Module, optim: Optim, losses: Losses) -> list[float]:
    """Train `model` as anybody would: one optimizer, one backward pass; returns the sum of `losses` at each step."""
    model.train()
    optimizer, _ = optim.build(model.parameters())
    totals = []
    for rows in order():
        found = losses(rows)
        optimizer.zero_grad()
        torch.autograd.backward(found)
        optimizer.step()
        totals.append(sum(float(loss.detach()) for loss in found))
    return totals


def assert_same_bits(topology: Topology, engine: LocalEngine, model: nn.Module) -> None:
    state, expected = topology.state_dict(engine.modules(0)), model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    with stream(derive(0, "model")):
        return factory()


def resnet() -> nn.Module:
    return resnet8((1, 8, 8), 10)


# The skips of the U-Net reach from "down1" to "join1" and from "down2" to "join2".
CHAINS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Topology]]] = {
    "u_shaped resnet8": (resnet, lambda m: u_shaped(m, ("conv1", "stage1.relu1", "stage2", "pool"))),
    "u_shaped mlp, one linear layer at the server": (
        lambda: mlp((1, 8, 8), 10, (32,), identity_head=True),
        lambda m: u_shaped(m, ("relu1", "fc2")),
    ),
    "u_shaped unet": (SmallUNet, lambda m: u_shaped(m, ("pool1", "pool2", "middle", "up1"))),
    "multi_hop relayed": (resnet, lambda m: multi_hop(m, ("relu1", "stage1", "stage2", "pool"))),
    "multi_hop client": (
        resnet,
        lambda m: multi_hop(m, ("conv1", "stage1", "stage2", "stage3", "pool"), None, "client"),
    ),
    "multi_hop server": (resnet, lambda m: multi_hop(m, ("bn1", "stage1", "stage2", "flatten"), None, "server")),
    "multi_hop unet, skips handed on": (SmallUNet, lambda m: multi_hop(m, ("pool1", "pool2"))),
    "multi_hop unet, four cuts": (
        SmallUNet,
        lambda m: multi_hop(m, ("pool1", "down2", "middle", "up1"), None, "client"),
    ),
    "multi_hop unet": (SmallUNet, lambda m: multi_hop(m, ("down1.0", "join1"))),
    "multi_hop unet back": (SmallUNet, lambda m: multi_hop(m, ("pool1", "pool2", "up2"), None, "client")),
}


@every_optim
@pytest.mark.parametrize("name", thin(CHAINS, 2))
def test_a_cut_model_equals_the_uncut_one(name: str, optim: Optim) -> None:
    factory, build = CHAINS[name]
    model = made(factory)
    uncut, topology, (x, y) = copy.deepcopy(model), build(model), images(ROWS)
    engine = engine_of(topology, x, y, optim=optim)
    expected = reference(uncut, optim, lambda rows: [functional.cross_entropy(uncut(x[rows]), y[rows])])
    assert engine.train(0, 0, order()) == expected
    assert_same_bits(topology, engine, uncut)
    uncut.eval()
    with torch.no_grad():
        assert torch.equal(engine.predict(0, "train", "evaluate").outputs[topology.heads[0].value], uncut(x))


class Gate(nn.Module):
    """A fusion with weights: the first release, times a learnt function of all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = block(12, 6)

    def forward(self, *parts: Tensor) -> Tensor:
        return parts[0] * self.gate(torch.cat(parts, 1))


TWO, FOUR = {"a": 3, "b": 5}, {"a": 3, "b": 5, "c": 2, "d": 4}
# Widths of the parties, the fusion, what it is six wide times, the role with the labels, whether the head is there.
VERTICAL: dict[str, tuple[Mapping[str, int], str | nn.Module, int, str, bool]] = {
    "two concat, labels at a feature party": (TWO, "concat", 2, "b", False),
    "four concat, labels at a party of their own": (FOUR, "concat", 4, "registry", False),
    "four sum, labels at the server": (FOUR, "sum", 1, "server", False),
    "four mean, head at a feature party": (FOUR, "mean", 1, "c", True),
    "two sum, head at a party of its own": (TWO, "sum", 1, "registry", True),
    "two with a module": (TWO, Gate(), 1, "a", False),
    "two with a module, head": (TWO, Gate(), 1, "a", True),
}


@every_optim
@pytest.mark.parametrize("name", VERTICAL)
def test_vertical_equals_one_module(name: str, optim: Optim) -> None:
    widths, fusion, times, labels, has_head = VERTICAL[name]
    bottoms = {role: block(wide, 6) for role, wide in widths.items()}
    top, head = nn.Sequential(block(6 * times, 8), nn.Linear(8, 10)), nn.Linear(10, 10) if has_head else None
    module = Fusion(fusion) if isinstance(fusion, str) else fusion
    parts = {"top": top} if head is None else {"top": top, "head": head}
    whole = copy.deepcopy(Whole(bottoms, module, **parts))
    topology = vertical(bottoms, top, labels=labels, fusion=fusion, head=head, task=classification(10))
    x, y = columns(widths, ROWS)
    engine = placed(topology, x, {topology.heads[0].value: y}, optim=optim)

    def loss(rows: Tensor) -> list[Tensor]:
        return [functional.cross_entropy(whole({role: t[rows] for role, t in x.items()}), y[rows])]

    assert engine.train(0, 0, order()) == reference(whole, optim, loss)
    assert_same_bits(topology, engine, whole)
    whole.eval()
    with torch.no_grad():
        assert torch.equal(engine.predict(0, "train", "evaluate").outputs[topology.heads[0].value], whole(x))


@every_optim
@pytest.mark.parametrize("labels", ["a", "relay", "server", "registry"])
def test_extended_vanilla_equals_one_module(labels: str, optim: Optim) -> None:
    bottoms = {role: block(wide, 6) for role, wide in FOUR.items()}
    middle, top = block(24, 8), nn.Linear(8, 10)
    whole = copy.deepcopy(Whole(bottoms, Fusion(), middle=middle, top=top))
    topology = extended_vanilla(bottoms, middle, top, labels=labels, task=classification(10))
    x, y = columns(FOUR, ROWS)
    engine = placed(topology, x, {"top_out": y}, optim=optim)

    def loss(rows: Tensor) -> list[Tensor]:
        return [functional.cross_entropy(whole({role: t[rows] for role, t in x.items()}), y[rows])]

    assert engine.train(0, 0, order()) == reference(whole, optim, loss)
    assert_same_bits(topology, engine, whole)


@every_optim
@pytest.mark.parametrize("weights", [{}, {"risk": 0.3, "stay": 1.7}], ids=["even", "weighted"])
@pytest.mark.parametrize("parties", [{"client": 4}, TWO], ids=["one party", "two parties"])
@pytest.mark.parametrize("servers", [("ward", "risk"), ("ward", "risk", "stay")], ids=["two", "three"])
def test_multi_task_equals_one_module(
    servers: Sequence[str], parties: Mapping[str, int], weights: Mapping[str, float], optim: Optim
) -> None:
    """Gradients of the tasks meet in the order in which one backward pass over all losses adds them."""
    weights = {server: weight for server, weight in weights.items() if server in servers}
    bottoms = {role: block(wide, 6) for role, wide in parties.items()}
    tops = {server: nn.Linear(6 * len(parties), 10 if server == "ward" else 1) for server in servers}
    whole = copy.deepcopy(ManyTops(bottoms, tops))
    targets = {server: None if server == "ward" else server for server in servers}
    topology = multi_task(bottoms, tops, targets=targets, labels={"ward": next(iter(parties))}, weights=weights)
    topology = topology.with_tasks({None: classification(10), "risk": regression(), "stay": regression()})
    x, y = columns(parties, ROWS)
    labels = {"out_ward": y, "out_risk": torch.sin(y.float()), "out_stay": torch.cos(y.float())}
    labels = {f"out_{server}": labels[f"out_{server}"] for server in servers}
    engine = placed(topology, x, labels, optim=optim)

    def losses(rows: Tensor) -> list[Tensor]:
        outputs = whole({role: t[rows] for role, t in x.items()})
        found = []
        for head in topology.heads:
            assert head.task is not None
            loss = head.task.loss(outputs[head.value], labels[head.value][rows])
            found.append(loss * head.weight)
        return found

    expected = reference(whole, optim, losses)
    # The run reports the sum of weight times loss in double precision, the reference in single.
    assert engine.train(0, 0, order()) == pytest.approx(expected, rel=1e-6)
    assert_same_bits(topology, engine, whole)


def test_a_sum_of_linear_bottoms_is_the_joint_linear_model() -> None:
    """W x = sum of W_i x_i: the same model, added in another order, so equal to float64's round-off."""
    x, _ = columns(FOUR, ROWS)
    x = {role: t.double() for role, t in x.items()}
    together = torch.cat(list(x.values()), 1)
    y = (together @ torch.linspace(-1, 1, 14).double()).unsqueeze(1)
    joint = nn.Linear(14, 1).double()
    bottoms: dict[str, nn.Module] = {role: nn.Linear(wide, 1, bias=role == "a").double() for role, wide in FOUR.items()}
    with torch.no_grad():
        pieces = joint.weight.split(list(FOUR.values()), 1)
        for module, piece in zip(bottoms.values(), pieces, strict=True):
            module.weight.copy_(piece)
        bottoms["a"].bias.copy_(joint.bias)
    optim = Optim("SGD", {"lr": 0.01, "momentum": 0.9})
    topology = vertical(bottoms, nn.Identity(), labels="server", fusion="sum", task=regression())
    engine = placed(topology, x, {"top_out": y}, optim=optim)
    expected = reference(joint, optim, lambda rows: [functional.mse_loss(joint(together[rows]), y[rows])])
    losses = engine.train(0, 0, order())
    assert losses == pytest.approx(expected, rel=1e-12)
    assert losses[-1] < 0.1 * losses[0]
    state = topology.state_dict(engine.modules(0))
    learnt = torch.cat([state[f"bottoms.{role}.weight"] for role in FOUR], 1)
    assert torch.allclose(learnt, joint.weight, rtol=0, atol=1e-12)
    assert torch.allclose(state["bottoms.a.bias"], joint.bias, rtol=0, atol=1e-12)


@every_optim
def test_two_makes_of_clients_equal_a_loop_by_hand(optim: Optim) -> None:
    """The clients take turns of five steps; each keeps its own bottom, both train the server's segment."""
    x, y = columns({"client": 4}, ROWS)
    x, top = x["client"], nn.Sequential(block(6, 8), nn.Linear(8, 10))
    makes = [block(4, 6), nn.Sequential(block(4, 9), nn.Linear(9, 6))]
    topologies = heterogeneous(
        [vertical({"client": bottom}, top, labels="client", task=classification(10)) for bottom in makes]
    )
    facts = [pass_example(t, {"client": x[:4]}) for t in topologies]
    engine = LocalEngine(topologies, facts, 2, optims=dict.fromkeys(topologies[0].roles, optim))
    halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
    for replica, (rows, labels) in enumerate(halves):
        engine.own(replica, "train", {"client": rows}, {"top_out": labels})
    bottoms, server = copy.deepcopy(makes), copy.deepcopy(top)
    optimizers = [optim.build(module.parameters())[0] for module in (*bottoms, server)]
    for turn in range(12):
        replica, steps = turn % 2, order(ROWS // 2, 60)[5 * turn : 5 * turn + 5]
        expected, (mine, known) = [], halves[replica]
        for rows in steps:
            loss = functional.cross_entropy(server(bottoms[replica](mine[rows])), known[rows])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            optimizers[replica].step()
            optimizers[2].step()
            expected.append(float(loss.detach()))
        assert engine.train(replica, turn, steps) == expected
    for replica, bottom in enumerate(bottoms):
        whole = Whole({"client": bottom}, Fusion(), top=server)
        state = topologies[replica].state_dict(engine.modules(replica))
        for name, value in whole.state_dict().items():
            assert torch.equal(state[name], value), (replica, name)


def test_fusions_by_hand() -> None:
    parts = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]]), torch.tensor([[100.0, 200.0]])
    assert Fusion("concat")(*parts).tolist() == [[1, 2, 10, 20, 100, 200]]
    assert Fusion("sum")(*parts).tolist() == [[111, 222]]
    assert Fusion("mean")(*parts).tolist() == [[37, 74]]


def test_round_trips_have_names_of_their_own() -> None:
    def names(topology: Topology) -> list[tuple[str, str]]:
        return [(s.name, s.role) for s in topology.segments]

    one, three = u_shaped(resnet(), ("conv1", "pool")), ("conv1", "relu1", "stage1", "stage2", "stage3", "pool")
    assert names(one) == [("bottom", "client"), ("middle", "server"), ("head", "client")]
    assert [name for name, _ in names(u_shaped(resnet(), three))] == [
        "bottom", "middle1", "between1", "middle2", "between2", "middle3", "head",
    ]  # fmt: skip
