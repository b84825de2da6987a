"""MID on the side of labels: its terms by hand, where it stands, resuming, what it hides and what it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed
from splitfed.attacks.labels.model_completion import ModelCompletion
from splitfed.core.defense import Defense
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import binary, classification
from splitfed.core.topology import Head, Segment, Topology
from splitfed.data.dataset import Federation
from splitfed.defenses import DpSgd, Mid, MidLabels
from splitfed.defenses.fitted_layers import InputLayers, OutputLayers
from splitfed.engines.local import LocalEngine
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.topologies import custom, multi_hop, u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.examples import assert_refuses, assert_same, images, placed
from tests.rounding import single
from tests.topologies.vertical_examples import perceptron, with_active

ROWS = 12


def chain(outputs: int = 10) -> nn.Module:
    with stream(0):
        return mlp((1, 8, 8), outputs, (16, 12, 6), seed=None)


def fixed(weight: float, deviation: float = 0.5) -> LocalEngine:
    """A u-shaped run whose bottleneck passes z as the mean and has the same deviation everywhere."""
    topology = u_shaped(chain(), ("relu1", "relu3")).with_task(classification(10))
    x, y = images(ROWS)
    bare = placed(topology, {"input_1": x}, {"fc4": y})
    fitted = MidLabels(weight=weight).fit(topology, bare.facts, 0)
    layer = fitted.segment("head").module.layers["0"]
    with torch.no_grad():
        nn.init.eye_(layer.mean.weight)
        nn.init.zeros_(layer.mean.bias)
        nn.init.zeros_(layer.spread.weight)
        nn.init.constant_(layer.spread.bias, 5 + math.log(math.exp(deviation) - 1))
    sgd, defenses = Optim("SGD", {"lr": 1.0}), [MidLabels(weight=weight)]
    return placed(fitted, {"input_1": x}, {"fc4": y}, optim=sgd, defenses=defenses)


def step(engine: LocalEngine) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What arrived at the labels in one step, the gradient that was sent back for it, and the head after it."""
    with engine.record_party("client0") as client, engine.record_party("server") as server:
        engine.train(0, 0, [torch.arange(ROWS)])
    (z,) = client.view().select(kind="activation").tensors().values()
    g = server.view().select(kind="gradient", edge="middle->head").tensors()["relu3"]
    return z, g, engine.party(0, "client").state.contents()


def test_the_terms_by_hand() -> None:
    """With mu = z and s = 1/2, KL is sum((z² + 1/4 + log 4 - 1) / 2) a row; its gradient at z is z / rows a row."""
    z, bare, _ = step(fixed(0.0))
    same, g, after = step(fixed(0.3))
    assert torch.equal(z, same)
    assert float((g - bare).abs().max()) > 1e-3, "without the term another gradient leaves"
    assert (g - bare).flatten().tolist() == single((0.3 * z / ROWS).flatten().tolist(), size=float(g.abs().max()))
    engine = fixed(0.3)
    layer = engine.topology.segment("head").module.layers["0"]
    layer.edges = ("middle->head",)
    layer.kept = (z, torch.full_like(z, 0.5))
    context = _context(InputLayers(nn.Identity(), {0: layer}))
    kl = (z.square() + 0.25 + math.log(4) - 1).sum(1).mean() / 2
    assert float(MidLabels(weight=0.3).penalty_at_receiver(context)) == single(0.3 * float(kl))
    # d KL / d s is s - 1/s, and that of s by the bias sigmoid(h - 5) = 1 - e^-s; the task's loss has its part in it.
    free, with_term = (step(fixed(w))[2]["head/layers.0.spread.bias"] for w in (0.0, 0.3))
    assert torch.allclose(with_term - free, torch.full((6,), -0.3 * (0.5 - 2) * (1 - math.exp(-0.5))), atol=1e-5)
    assert not torch.equal(after["head/layers.0.mean.weight"], torch.eye(6))


def _context(module: nn.Module) -> splitfed.Context:
    stamp = splitfed.core.messages.Stamp("train", 0, 0, 0)
    return splitfed.Context("client0", "middle->head", stamp, 0, 0, module=module)


def test_the_loss_is_that_of_a_noised_value_and_predictions_are_those_of_the_mean() -> None:
    """The gradient of CE(head(z + s e)): e is recovered from the draws, one standard normal a number."""
    engine = fixed(0.0)
    head = engine.modules(0)["head"]
    last = head.module.fc4
    weight, bias = last.weight.detach().clone(), last.bias.detach().clone()
    drawn: list[Tensor] = []
    last.register_forward_pre_hook(lambda module, given: drawn.append(given[0].detach()))
    z, g, _ = step(engine)
    e = (drawn[0] - z) / 0.5
    assert float(e.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(e.numel()))
    assert float(e.std()) == pytest.approx(1.0, abs=4 / math.sqrt(2 * e.numel()))
    leaf = z.clone().requires_grad_()
    functional.cross_entropy((leaf + 0.5 * e) @ weight.T + bias, images(ROWS)[1]).backward()
    assert torch.allclose(g, leaf.grad, atol=1e-6)
    step(engine)
    assert not torch.allclose(drawn[1] - drawn[0], torch.zeros(()), atol=0.1), "drawn afresh"
    found = [engine.predict(0, "train", "predict", number).outputs["fc4"] for number in (0, 1)]
    assert torch.equal(*found)


def two(labels: str = "server", head: nn.Module | None = None) -> Topology:
    with stream(0):
        bottoms = {side: nn.Sequential(nn.Linear(4, 6), nn.ReLU()) for side in ("left", "right")}
        top = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))
        return vertical(bottoms, top, labels=labels, head=head)


def rare() -> nn.Module:
    with stream(0):
        return mlp((8,), 1, (12, 8, 6), seed=None)


# A topology, and segment -> how many of its inputs have a bottleneck before them.
CELLS: dict[str, tuple[Callable[[], Topology], dict[str, int]]] = {
    "vertical": (two, {"fusion": 2}),
    "vertical, sent to the server": (lambda: two("left"), {"fusion": 1}),
    "vertical, head at the labels": (lambda: two("left", head=nn.Linear(1, 1)), {"head": 1}),
    "u_shaped": (lambda: u_shaped(rare(), ("relu1", "relu2")), {"head": 1}),
    "multi_hop": (lambda: multi_hop(rare(), ("relu1", "relu2"), labels="server"), {"top": 1}),
}


@cache
def federation() -> Federation:
    random = generator(3, "rare")
    x = torch.randn(160, 8, generator=random)
    y = (x @ torch.randn(8, generator=random) > 1.0).long()
    data = splitfed.data.from_arrays(x, y, task=binary(), name="rare")
    return data.vertical({"left": range(4), "right": range(4, 8)}, overlap=True).clients(1, auxiliary=40, victims=40)


def trained(cell: str, *defenses: Defense, **options: Any) -> Run:
    return splitfed.train(
        CELLS[cell][0](), federation(), **{"rounds": 2, "batch_size": 32, "defenses": defenses, **options}
    )


@pytest.mark.parametrize("cell", CELLS)
def test_stands_before_every_value_whose_gradient_tells_labels(cell: str) -> None:
    """Messages are as long as without it, and as planned; what goes back teaches another first segment."""
    defenses = (MidLabels(weight=0.01),)
    run, bare = trained(cell, *defenses), trained(cell)
    modules = {n: m for party in run.engine.parties.values() for n, m in party.state.modules.items()}
    assert {n: len(m.layers) for n, m in modules.items() if isinstance(m, InputLayers)} == CELLS[cell][1]
    assert run.bytes == bare.bytes
    plan = {"schedule": run.schedule, "defenses": defenses, "optimizer": None, "training": Training(32)}
    ready = prepare(CELLS[cell][0](), federation(), **plan)
    assert cost(ready, 2).flows == {flow: n for flow, n in run.engine.traffic.flows.items() if flow.phase == "train"}
    role = next(r for r in run.engine.topology.roles if r in run.engine.topology.inputs.values())
    first, second = (next(iter(r.engine.party(0, role).state.contents().values())) for r in (run, bare))
    assert not torch.equal(first, second)


class Stop(Exception):
    """Stands for a crash."""


def stop_first(done: int, rounds: int, metrics: Any) -> None:
    raise Stop


@pytest.mark.parametrize("cell", ["u_shaped", "vertical"])
def test_stopped_and_resumed(cell: str, tmp_path: Path) -> None:
    defense = MidLabels(weight=splitfed.core.annealing.Linear(0.0, 0.1, 2))
    with pytest.raises(Stop):
        trained(cell, defense, logging=splitfed.Logging(folder=tmp_path / "run", progress=stop_first))
    resumed = trained(cell, defense, logging=splitfed.Logging(folder=tmp_path / "run", resume=True))
    assert_same(resumed.engine.state()["parties"], trained(cell, defense).engine.state()["parties"])


def test_beside_a_bottleneck_at_the_sender() -> None:
    """Both stand at the two ends of the same edge, each with its own term."""
    modules = trained("multi_hop", Mid(on=("hop1->top",)), MidLabels()).engine.modules(0)
    assert {name: type(module) for name, module in modules.items() if name != "bottom"} == {
        "hop1": OutputLayers,
        "top": InputLayers,
    }


@cache
def planted() -> Federation:
    """Three classes in three numbers of the peer's among twelve louder ones, and in three of the active party's own."""
    random = generator(5, "planted")
    y = torch.randint(3, (600,), generator=random)
    shown = [torch.eye(3)[y] + 0.25 * torch.randn(600, 3, generator=random) for _ in range(2)]
    x = torch.cat([shown[0], 2 * torch.randn(600, 12, generator=random), shown[1]], 1)
    data = splitfed.Dataset("planted", x, y, classification(3), None)
    parts = {"peer": range(15), "active": range(15, 18)}
    return data.vertical(parts, overlap=True).clients(1, auxiliary=150, victims=150, validation=0.0)


def test_the_peers_bottom_learns_less_of_labels_that_the_active_party_can_tell_without_it() -> None:
    """Completion with four labels a class falls towards one in three; who may rest on its own columns loses nothing."""
    found = []
    for defenses in ((), (MidLabels(weight=0.3),)):
        bottoms = {"peer": perceptron((15, 8, 4), 1), "active": perceptron((3, 8, 4), 2)}
        options = {
            "rounds": 8,
            "batch_size": 32,
            "evaluation": splitfed.Evaluation(every=8),
            "optimizer": Optim("Adam", {"lr": 0.01}),
        }
        topology = with_active(bottoms, perceptron((8, 16, 3), 3))
        run = splitfed.train(topology, planted(), defenses=defenses, **options)
        (result,) = run.attack(ModelCompletion(iterations=100), adversary="peer0")
        found.append((run.accuracy, result.scores["attack"]["accuracy"].mean))
    (plain, leak), (guarded, left) = found
    assert min(plain, guarded) > 0.95
    assert left < leak - 0.1, found


def test_a_gradient_still_tells_its_rows_label() -> None:
    """Where logits are only added up, the sign of the gradient at the cut does; the layer may turn it, for all rows."""
    rows = splitfed.data.breast_cancer().vertical({"left": range(15), "right": range(15, 30)}, overlap=True)
    data = rows.clients(1, auxiliary=20, victims=100, validation=0.0)
    found = []
    for weight in (None, 0.01):
        with stream(0):
            bottoms = {side: nn.Linear(15, 1) for side in ("left", "right")}
            topology = vertical(bottoms, nn.Identity(), labels="server", fusion="sum")
        defenses = () if weight is None else (MidLabels(weight=weight),)
        run = splitfed.train(topology, data, rounds=1, defenses=defenses)
        (result,) = run.attack("direct_label", adversary="left0")
        found.append(abs(result.scores["attack"]["auc"].mean - 0.5))
    assert found[0] == 0.5
    assert 0.45 < found[1] <= 0.5


def double() -> Topology:
    """The server reads what arrives in two places."""
    segments = [
        Segment("one", "client", nn.Linear(8, 4), ("x",), ("a",)),
        Segment("two", "server", nn.Linear(4, 4), ("a",), ("b",)),
        Segment("join", "server", splitfed.topologies.Fusion("concat"), ("a", "b"), ("c",)),
        Segment("top", "server", nn.Linear(8, 1), ("c",), ("out",)),
    ]
    return custom(segments, {"x": "client"}, [Head("out", "server", "server")])


def flat_matrix() -> Topology:
    """What comes back to the client is a matrix a row."""
    layers = (nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Identity(), nn.Flatten(), nn.Linear(8, 1))
    return u_shaped(nn.Sequential(*layers), ("0", "2"))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "weight": (lambda: MidLabels(weight=-0.1), "mid_labels weight=-0.1 is not allowed; expected a number in [0, inf)"),
    "labels are sent": (
        lambda: MidLabels().edges(vanilla(rare(), "relu1")),
        "MidLabels has no gradient to guard: none goes from a party that knows labels to one that does not (labels of",
    ),
    "labels are relayed": (lambda: MidLabels().edges(multi_hop(rare(), ("relu1", "relu2"))), "MidLabels has no grad"),
    "no labels at the receiver": (
        lambda: MidLabels(on=("bottom->middle",)).edges(u_shaped(rare(), ("relu1", "relu2"))),
        "MidLabels cannot guard edge 'bottom->middle': no gradient goes back on it from a party that knows labels",
    ),
    "twice": (lambda: trained("u_shaped", MidLabels(), MidLabels()), "mid_labels guards value 'relu2' twice"),
    "read twice": (
        lambda: splitfed.train(double(), federation(), defenses=MidLabels()),
        "mid_labels cannot guard 'a': role 'server' reads it in two and in join; one of them would bypass",
    ),
    "some clients": (lambda: trained("u_shaped", MidLabels(clients=(0,))), "MidLabels for some clients alone is not"),
    "shape": (
        lambda: splitfed.train(flat_matrix(), federation(), defenses=MidLabels()),
        "mid_labels cannot guard '_2' of shape (2, 4) a row: expected (features,) or (channels, height, width)",
    ),
    "dp_sgd": (
        lambda: trained("u_shaped", MidLabels(), DpSgd(noise_multiplier=1.0)),
        "dp_sgd cannot stand beside MidLabels: its penalty_at_receiver may mix the rows of a batch",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    assert_refuses(*REFUSED[case])
