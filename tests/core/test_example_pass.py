"""The probe: shapes, misfits named by edge, and modules and random state left as they were."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.model_snapshot import drawn_packages, generator_states
from splitfed.core.step_plan import segment_plans
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies import u_shaped, vanilla
from tests.core.cut_idioms import Net
from tests.examples import Dropped, InPlaceAfterCut, SmallUNet, images


class Returns(nn.Module):
    """Returns whatever the function makes of its input."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> object:
        return self._function(x)  # type: ignore[operator]


def pair(bottom: nn.Module, top: nn.Module, outputs: tuple[str, ...] = ("h",)) -> Topology:
    segments = (
        Segment("bottom", "client", bottom, ("x",), outputs, "bottom."),
        Segment("top", "server", top, outputs, ("out",), "top."),
    )
    return Topology("pair", segments, {"x": "client"}, (Head("out", "server", "client"),))


def test_facts_of_a_unet_in_three() -> None:
    facts = pass_example(u_shaped(SmallUNet(), ("pool1", "up2")), {"x": images(4)[0]})
    assert facts.shapes == {
        "x": (1, 8, 8),
        "pool1": (4, 4, 4),
        "down1_2": (4, 8, 8),
        "up2": (8, 4, 4),
        "down2_2": (8, 4, 4),
        "head": (10,),
    }
    assert set(facts.dtypes.values()) == {torch.float32}
    assert facts.batch_norm == {"bottom", "middle"}
    assert facts.stochastic == frozenset()
    assert not any(facts.overwritten.values())


def test_overwritten_inputs_and_dropout_are_found() -> None:
    facts = pass_example(vanilla(InPlaceAfterCut(), "conv"), {"x": images(4)[0]})
    assert facts.overwritten == {"bottom": frozenset(), "top": frozenset({"conv"})}
    assert pass_example(vanilla(Dropped(), "relu1"), {"x": images(4)[0]}).stochastic == {"bottom", "top"}
    assert pass_example(vanilla(Dropped(), "drop2"), {"x": images(4)[0]}).stochastic == {"bottom"}


def test_modules_buffers_and_random_state_are_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 10)).eval()
    topology, x = vanilla(model, "1"), images(4)[0]
    state, random, kept = copy.deepcopy(model.state_dict()), torch.get_rng_state(), x.clone()
    pass_example(topology, {"x": x, "input_1": x} if "input_1" in topology.inputs else {"x": x})
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, kept)
    assert not any(m.training for m in model.modules())


def test_a_misfit_names_segment_edge_and_shapes() -> None:
    text = "segment 'top' cannot take what arrives on edge bottom->top (h (4, 3)): "
    with pytest.raises(InvalidInput, match=re.escape(text) + r".+\(4x3 and 5x2\)") as caught:
        pass_example(pair(nn.Linear(2, 3), nn.Linear(5, 2)), {"x": torch.rand(4, 2)})
    assert "\n" not in str(caught.value)


def test_a_misfit_of_the_data_names_the_input() -> None:
    text = "segment 'bottom' cannot take what arrives on input of 'bottom' (x (4, 7))"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        pass_example(pair(nn.Linear(2, 3), nn.Linear(3, 2)), {"x": torch.rand(4, 7)})


def test_a_misfit_that_a_module_asserts_is_named_too() -> None:
    """Some of torch's own modules (attention) check shapes with `assert`."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    top = Segment("top", "server", attention, ("h", "h2", "h3"), ("out",))
    bottom = Segment("bottom", "client", Returns(lambda x: (x, x, x)), ("x",), ("h", "h2", "h3"))
    with pytest.raises(InvalidInput, match="segment 'top' cannot take what arrives on edge bottom->top"):
        pass_example(
            Topology("t", (bottom, top), {"x": "client"}, (Head("out", "server", "client"),)),
            {"x": torch.rand(4, 3, 6)},
        )


@pytest.mark.parametrize(
    ("function", "outputs", "text"),
    [
        (lambda x: {"h": x}, ("h",), "value 'h' of segment 'bottom' is a dict, no tensor: it cannot cross a cut"),
        (lambda x: 3, ("h",), "value 'h' of segment 'bottom' is a int, no tensor"),
        (
            lambda x: x.sum(),
            ("h",),
            "value 'h' of segment 'bottom' has shape (); the first dimension must be the batch",
        ),
        (lambda x: x.T, ("h",), "has shape (2, 4); the first dimension must be the batch (4 rows here)"),
        (lambda x: (x, x, x), ("h", "g"), "segment 'bottom' returned 3 values; it names 2: h, g"),
        (lambda x: x, ("h", "g"), "segment 'bottom' returned 1 values; it names 2: h, g"),
    ],
)
def test_what_cannot_cross_is_refused(function: object, outputs: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)):
        pass_example(pair(Returns(function), nn.Linear(2, 2), outputs), {"x": torch.rand(4, 2)})


def test_an_input_without_data_is_named() -> None:
    with pytest.raises(InvalidInput, match="input 'x' of topology 'pair' is fed by no data"):
        pass_example(pair(nn.Linear(2, 2), nn.Linear(2, 2)), {"y": torch.rand(4, 2)})


class ModalityDropout(nn.Module):
    """Leaves the second modality out of every other training step."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self._draw, self.fc = draw, nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.training and self._draw() < 0.5:
            b = torch.zeros_like(b)
        return self.fc(torch.cat([a, b], 1))


DRAWS = {"torch": lambda: float(torch.rand(())), "random": random.random, "numpy": np.random.rand}


@pytest.mark.parametrize("package", DRAWS)
def test_no_random_draw_decides_whether_a_party_is_trained(package: str) -> None:
    segments = (
        Segment("b0", "client0", nn.Linear(3, 2), ("x0",), ("z0",)),
        Segment("b1", "client1", nn.Linear(3, 2), ("x1",), ("z1",)),
        Segment("top", "server", ModalityDropout(DRAWS[package]), ("z0", "z1"), ("out",)),
    )
    heads = (Head("out", "server", "server"),)
    topology = Topology("two modalities", segments, {"x0": "client0", "x1": "client1"}, heads)
    for seed in range(6):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)  # noqa: NPY002
            before = generator_states()
            facts = pass_example(topology, {"x0": torch.ones(4, 3), "x1": torch.ones(4, 3)})
            assert drawn_packages(before, generator_states()) == []
        assert facts.stochastic == ({"top"} if package == "torch" else set())
        back = {
            port.edge: port.returned
            for segment_plan in segment_plans(topology, facts, ())["server"]
            for port in segment_plan.arrivals
        }
        assert back == {"b0->top": ("z0",), "b1->top": ("z1",)}


def test_a_random_draw_hides_no_stopped_gradient_of_a_traced_piece() -> None:
    model = Net(lambda m, x: m.c(m.drop(m.b(m.a(x).detach()))), drop=nn.Dropout())
    assert pass_example(vanilla(model, "a"), {"x": torch.ones(4, 8)}).no_gradient == {("a", "top")}


def test_a_segment_by_hand_that_draws_nothing_and_stops_the_gradient_gets_none_back() -> None:
    topology = pair(nn.Linear(2, 3), Returns(lambda h: h.detach() * 2))
    assert pass_example(topology, {"x": torch.ones(4, 2)}).no_gradient == {("h", "top")}
