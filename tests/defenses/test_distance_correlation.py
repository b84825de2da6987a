"""NoPeek: the combined loss to round-off, its two ends, and what it refuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.defenses import DistanceCorrelation
from splitfed.engines.local import LocalEngine
from splitfed.models.mlp import mlp
from splitfed.stats.dependence import distance_correlation, u_distance_correlation_sqr
from splitfed.topologies import multi_hop, u_shaped, vanilla
from tests.examples import InPlaceAfterCut, SmallUNet, assert_same, engine_of, images, toy_data

BUILDERS: dict[str, tuple[Callable[[InPlaceAfterCut], Topology], Callable[[InPlaceAfterCut, Tensor], Tensor]]] = {
    "vanilla": (lambda m: vanilla(m, "conv"), lambda m, x: m.conv(x)),
    "u_shaped": (lambda m: u_shaped(m, ("conv", "fc1")), lambda m, x: m.conv(x)),
}
MEASURES = {"biased": distance_correlation, "unbiased": u_distance_correlation_sqr}


@pytest.mark.parametrize("statistic", MEASURES)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", BUILDERS)
def test_every_weight_moves_by_the_gradient_of_the_combined_loss(shape: str, alpha: float, statistic: str) -> None:
    """(1 - alpha) CE + alpha DCOR(x, z) on the uncut model, in double precision."""
    build, bottom = BUILDERS[shape]
    model = InPlaceAfterCut().double()
    uncut = copy.deepcopy(model)
    x, y = images(16)
    defenses = [DistanceCorrelation(alpha=alpha, statistic=statistic)]
    topology = build(model)
    engine = engine_of(topology, x.double(), y, optim=Optim("SGD", {"lr": 1.0}), defenses=defenses)
    engine.train(0, 0, [torch.arange(16)])
    task = functional.cross_entropy(uncut(x.double()), y)
    penalty = MEASURES[statistic](x.double(), bottom(uncut, x.double()))
    ((1 - alpha) * task + alpha * penalty).backward()
    state = topology.state_dict(engine.modules(0))
    for name, parameter in uncut.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        moved = model.state_dict()[name] - state[name]
        assert torch.allclose(moved, expected, rtol=0, atol=1e-13), name
    scale = float(state["conv.weight"].sub(model.state_dict()["conv.weight"]).abs().max())
    assert scale > 1e-4, "the gradient is not lost in the tolerance"


def test_the_reported_loss_is_the_tasks_own() -> None:
    """Unweighted, so that runs with different alphas compare."""
    model, (x, y) = InPlaceAfterCut(), images(16)
    engine = engine_of(vanilla(model, "conv"), x, y, defenses=[DistanceCorrelation(alpha=0.5)])
    (loss,) = engine.train(0, 0, [torch.arange(16)])
    assert loss == pytest.approx(float(functional.cross_entropy(model(x), y).detach()))


@pytest.mark.parametrize("shape", BUILDERS)
def test_alpha_zero_trains_to_the_bits_of_no_defense(shape: str) -> None:
    states = []
    for defenses in ([], [DistanceCorrelation(alpha=0.0)]):
        torch.manual_seed(0)
        engine = engine_of(BUILDERS[shape][0](InPlaceAfterCut()), *images(64), defenses=defenses)
        engine.train(0, 0, list(torch.arange(64).split(8)))
        states.append(engine.state()["parties"])
    assert_same(states[0], states[1])


def test_alpha_one_removes_the_task() -> None:
    """The server's weights stay, labels do not matter, and the gradient that returns is zero."""
    x, y = images(16)
    states = []
    for labels in (y, (y + 1) % 10):
        torch.manual_seed(0)
        model = InPlaceAfterCut()
        engine = engine_of(vanilla(model, "conv"), x, labels, defenses=[DistanceCorrelation(alpha=1.0)])
        with engine.record_party("client0") as recorder:
            engine.train(0, 0, [torch.arange(16)])
        assert float(recorder.view().tensors()["conv"].abs().max()) == 0.0
        assert_same(dict(engine.modules(0)["top"].state_dict()), _top(model))
        assert not torch.equal(engine.modules(0)["bottom"].conv.weight, model.conv.weight)
        states.append(engine.state()["parties"])
    assert_same(states[0], states[1])


def _top(model: InPlaceAfterCut) -> dict[str, Tensor]:
    return {name: t for name, t in model.state_dict().items() if name.startswith("fc")}


def release_of(engine: LocalEngine, x: Tensor) -> Tensor:
    engine.own(0, "held", {"x": x}, {})
    with engine.record_party("server") as recorder:
        engine.predict(0, "held", "predict")
    return next(iter(recorder.view().tensors().values()))


def test_training_lowers_the_dependence_on_held_out_rows() -> None:
    data, measured = toy_data(320), {}
    for alpha in (0.0, 0.5):
        torch.manual_seed(0)
        engine = engine_of(
            vanilla(InPlaceAfterCut(), "fc1"),
            data.x[:256],
            data.y[:256],
            optim=Optim("Adam", {"lr": 3e-3}),
            defenses=[DistanceCorrelation(alpha=alpha)],
        )
        for epoch in range(15):
            engine.train(0, epoch, list(torch.arange(256).split(32)))
        held = data.x[256:]
        measured[alpha] = float(u_distance_correlation_sqr(held, release_of(engine, held)))
    assert measured[0.5] < measured[0.0] - 0.1, measured


def test_a_hop_sends_what_depends_less_on_what_it_received() -> None:
    """(1 - alpha) CE + alpha DCOR(received, sent) on the uncut model; the client's weights feel it through the hop."""
    model = mlp((1, 8, 8), 10, (12, 10, 8)).double()
    uncut, (x, y) = copy.deepcopy(model), images(16)
    topology = multi_hop(model, ("relu1", "relu2"))
    defenses = [DistanceCorrelation(alpha=0.4, on=("hop1->top",))]
    engine = engine_of(topology, x.double(), y, optim=Optim("SGD", {"lr": 1.0}), defenses=defenses)
    engine.train(0, 0, [torch.arange(16)])
    parts = dict(uncut.named_children())
    received = parts["relu1"](parts["fc1"](parts["flatten"](x.double())))
    sent = parts["relu2"](parts["fc2"](received))
    scores = parts["fc4"](parts["relu3"](parts["fc3"](sent)))
    (0.6 * functional.cross_entropy(scores, y) + 0.4 * distance_correlation(received.detach(), sent)).backward()
    state = topology.state_dict(engine.modules(0))
    for name, parameter in uncut.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(model.state_dict()[name] - state[name], parameter.grad, rtol=0, atol=1e-13), name


def test_refuses_an_edge_that_is_not_there() -> None:
    topology, (x, y) = u_shaped(SmallUNet(), ("pool1", "up2")), images(8)
    with pytest.raises(InvalidInput, match="unknown edge 'botom->middle'; did you mean 'bottom->middle'"):
        engine_of(topology, x, y, defenses=[DistanceCorrelation(on=("botom->middle",))])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "above": ({"alpha": 1.5}, "distance_correlation alpha=1.5 is not allowed; expected a number in [0, 1]"),
    "below": ({"alpha": -0.1}, "distance_correlation alpha=-0.1 is not allowed"),
    "statistic": ({"statistic": "biassed"}, "unknown statistic 'biassed'; did you mean 'biased'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    arguments, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)):
        DistanceCorrelation(**arguments)
