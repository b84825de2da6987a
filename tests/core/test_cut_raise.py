"""What `cut` and the builders refuse, and what they say."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.core.tracer import ModelTracer
from splitfed.topologies import u_shaped, vanilla
from tests.examples import SmallUNet


class Layers(nn.Module):
    """Three layers, joined by whatever `forward` is passed in."""

    def __init__(self, forward: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(4))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def plain(m: Layers, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x)))


def branching(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    if h.sum() > 0:
        h = m.b(h)
    return m.c(h)


def dropping(m: Layers, x: Tensor) -> Tensor:
    return m.c(functional.dropout(m.b(m.a(x)), 0.5, m.training))


def reading_twice(m: Layers, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x) * m.scale) * m.scale)


def overwriting(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(m.b(m.relu(h)) + h)


def overwriting_a_view(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(m.b(m.relu(h.flatten(1))) + h)


def overwriting_by_method(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(m.b(h.mul_(2.0))) + h


def overwriting_what_was_released(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    g = h.mul_(2.0)
    return m.c(m.b(g)) + h


def pair(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h), m.c(h)  # type: ignore[return-value]


REFUSED = {
    "unknown": (plain, ("aa",), "unknown submodule of Layers 'aa'; did you mean 'a'"),
    "never called": (plain, ("spare",), "submodule 'spare' is never called by Layers; nothing to cut after"),
    "order": (plain, ("b", "a"), "cut 'a' runs before 'b'; name the cuts in the order they run"),
    "same place": (plain, ("a", "a"), "cuts 'a', 'a' leave an empty segment: two are the same place"),
    "nothing after": (plain, ("c",), "cut 'c' leaves an empty segment after 'c'"),
    "untraceable": (branching, ("a",), "Layers cannot be traced at 'if h.sum() > 0:' (test_cut_raise.py:"),
    "functional dropout": (dropping, ("a",), "Layers behaves otherwise in training at 'dropout'"),
    "in place, module": (overwriting, ("a", "b"), "'relu' overwrites 'a' in place, and 'add' reads it after a cut"),
    "in place, view": (overwriting_a_view, ("a", "b"), "'relu' overwrites 'a' in place, and 'add' reads it"),
    "in place, method": (overwriting_by_method, ("a", "b"), "'mul_' overwrites 'a' in place, and 'add' reads it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    forward, at, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        cut(Layers(forward), at)
    assert "\n" not in str(caught.value)


class ScaledByTrain(Layers):
    """Keeps what its mode is under another name."""

    factor = 1.0

    def train(self, mode: bool = True) -> ScaledByTrain:
        self.factor = 2.0 if mode else 1.0
        return super().train(mode)


class ScaledBySetting(Layers):
    """Takes the mode up where it is set."""

    factor = 1.0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training":
            super().__setattr__("factor", 2.0 if value else 1.0)


class ScaledByProperty(Layers):
    """Keeps the mode itself, out of the way of `nn.Module`."""

    @property
    def training(self) -> bool:  # type: ignore[override]
        return bool(vars(self).get("is_trained", True))

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self).update(is_trained=mode)


def scaled(factor: Callable[[Layers], float]) -> Callable[[Layers, Tensor], Tensor]:
    return lambda m, x: m.c(m.b(m.a(x))) * factor(m)


MODES: dict[str, tuple[type[Layers], Callable[[Layers], float]]] = {
    "attribute": (Layers, lambda m: 2.0 if m.training else 1.0),
    "attribute of a submodule": (Layers, lambda m: 2.0 if m.spare.training else 1.0),
    "getattr": (Layers, lambda m: 2.0 if getattr(m, "train" + "ing") else 1.0),
    "a function of a package": (Layers, lambda m: 2.0 if operator.attrgetter("spare.training")(m) else 1.0),
    "vars": (Layers, lambda m: 2.0 if vars(m)["training"] else 1.0),
    "__dict__": (Layers, lambda m: 2.0 if m.__dict__["training"] else 1.0),
    "train of its own": (ScaledByTrain, lambda m: m.factor),  # type: ignore[attr-defined,return-value]
    "__setattr__ of its own": (ScaledBySetting, lambda m: m.factor),  # type: ignore[attr-defined,return-value]
    "training of its own": (ScaledByProperty, lambda m: 2.0 if m.training else 1.0),
}


@pytest.mark.parametrize("case", MODES)
def test_a_trace_refuses_what_the_mode_changes_however_it_is_read(case: str) -> None:
    kind, factor = MODES[case]
    with pytest.raises(InvalidInput, match="behaves otherwise in training at 'mul'"):
        cut(kind(scaled(factor)), ("a",))


def test_a_model_that_never_reads_its_mode_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    trace = ModelTracer.trace
    monkeypatch.setattr(ModelTracer, "trace", lambda self, root: modes.append(root.training) or trace(self, root))
    model = Layers(plain).eval()
    cut(model, ("a",))
    assert modes == [True]
    assert not any(module.training for module in model.modules())
    assert "training" not in vars(nn.Module)


def only_in_training(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(m.b(h)) if m.training else m.c(h)


def freezing_in_forward(m: Layers, x: Tensor) -> Tensor:
    m.b.weight.requires_grad_(False)
    h = torch.relu(m.b(m.a(x)))
    m.b.weight.requires_grad_(True)
    return m.c(h)


def read_by_a_hook(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * m.marked[0])  # type: ignore[index]
    return m.c(m.b(h))


SAID = {
    "in training only": (only_in_training, "b", "submodule 'b' is never called by Layers in evaluation; nothing to"),
    "frozen in forward": (
        freezing_in_forward,
        "b",
        "forward of Layers calls requires_grad_() of 'b.weight' on another side of a cut than what reads it: freeze it",
    ),
    "read by a hook": (
        read_by_a_hook,
        "a",
        "forward of Layers, or a hook of it, reads the attribute 'marked', which this party does not hold, as nothing "
        "read it there when the model was cut: read it in every pass",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_replay_refuses_is_said_of_the_users_model(case: str) -> None:
    forward, at, text = SAID[case]
    model = Layers(forward)
    model.marked = [2]  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        vanilla(model, at, example=torch.randn(8, 4))
    assert "\n" not in str(caught.value)
    assert "LayersSegment" not in str(caught.value)


def test_a_trace_refuses_weights_that_are_frozen_in_forward() -> None:
    with pytest.raises(InvalidInput, match=r"calls requires_grad_\(\) of the weight 'b\.weight'.* outside of forward"):
        vanilla(Layers(freezing_in_forward), "b")


@pytest.mark.parametrize("width", [lambda x: x.shape[1], lambda x: x.size(-1)], ids=["shape", "size"])
def test_no_raw_data_is_asked_for_where_only_their_shape_is_read(width: Callable[[Tensor], int]) -> None:
    model = Layers(lambda m, x: m.c(m.b(m.a(x))) / width(x))
    with pytest.raises(InvalidInput, match=r"reads the shape of 'x', .* nothing else of it: cut with rows") as caught:
        vanilla(model, "a")
    assert "sent_inputs" not in str(caught.value)
    topology = vanilla(model, "a", example=torch.randn(8, 4))
    assert topology.segments[1].inputs == ("a",)


def test_a_function_with_more_defaults_than_arguments_is_no_obstacle() -> None:
    def two() -> int:
        return 2

    two.__defaults__ = (1,)
    model = Layers(lambda m, x: m.c(m.b(m.a(x))) * m.two())  # type: ignore[operator]
    model.two = two  # type: ignore[assignment]
    vanilla(model, "a", example=torch.randn(8, 4))


def test_weights_tied_across_a_cut_are_refused_by_name() -> None:
    model = Layers(plain)
    model.c.weight = model.a.weight
    with pytest.raises(InvalidInput, match=r"parameter 'a\.weight' would be shared by roles 'client' and 'server'"):
        vanilla(model, "a")


def test_a_parameter_read_on_two_sides_of_a_cut_is_refused_between_two_parties() -> None:
    with pytest.raises(InvalidInput, match="parameter 'scale' would be shared by roles 'client' and 'server'"):
        vanilla(Layers(reading_twice), "b")


def test_buffers_shared_across_a_cut_are_refused() -> None:
    """One norm without weights, called on both sides, keeps one running mean in the uncut model."""
    model = Layers(lambda m, x: m.c(m.norm(m.b(m.norm(m.a(x))))))  # type: ignore[operator]
    model.norm = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(InvalidInput, match="shared by roles 'client' and 'server'"):
        Topology("x", vanilla(model, "b").segments, {"x": "client"}, vanilla(model, "b").heads)


def test_weights_tied_within_one_role_are_kept() -> None:
    model = Layers(plain)
    model.c.weight = model.a.weight
    topology = u_shaped(model, ("a", "b"))
    assert topology.segments[0].module.a.weight is topology.segments[2].module.c.weight


def test_overwritten_memory_under_another_name_is_seen_through_contiguous() -> None:
    """`contiguous` hands back the same memory, so the head would read another value than in the uncut model."""

    def forward(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.c(m.b(torch.relu_(h.contiguous())) + h)

    with pytest.raises(InvalidInput, match="in place"):
        u_shaped(Layers(forward), ("a", "b"))


def test_what_was_released_and_overwritten_within_one_piece_is_accepted() -> None:
    assert len(cut(Layers(overwriting_what_was_released), ("a",))) == 2


def test_builders_want_one_output_and_two_cuts() -> None:
    with pytest.raises(InvalidInput, match="the model must have one output for this topology; it has 2"):
        vanilla(Layers(pair), "a")
    with pytest.raises(InvalidInput, match="expected an even number of submodules, two a round trip"):
        u_shaped(SmallUNet(), "down1")
    with pytest.raises(InvalidInput, match="expected an even number of submodules, two a round trip"):
        u_shaped(SmallUNet(), ("down1",))
