"""Cutting a model: what the pieces read and return, the model's own names, and the model left as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.cutting import Piece, cut
from splitfed.core.topology import Edge, Head, Segment, Topology
from splitfed.models.lenet import lenet
from splitfed.topologies import u_shaped, vanilla
from tests.examples import SmallUNet, images


def run_pieces(pieces: tuple[Piece, ...], x: Tensor) -> Tensor:
    """Run the pieces one after another on `x`, by the names of the values."""
    values = {pieces[0].inputs[0]: x}
    for piece in pieces:
        result = piece.module(*(values[name] for name in piece.inputs))
        values.update(zip(piece.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    return values[pieces[-1].outputs[-1]]


def in_three() -> Topology:
    first, second, third = cut(SmallUNet(), ("pool1", "up2"))
    segments = (
        Segment("zero", "a", first.module, first.inputs, first.outputs),
        Segment("one", "b", second.module, second.inputs, second.outputs),
        Segment("two", "c", third.module, third.inputs, third.outputs),
    )
    return Topology("three", segments, {"x": "a"}, (Head("head", "c", "c"),))


def test_a_unet_in_three_has_the_skips_as_edges() -> None:
    """The first skip jumps the middle; the second shares an edge with the value that runs through it."""
    assert in_three().edges == (
        Edge("zero", "one", ("pool1",)),
        Edge("zero", "two", ("down1_2",)),
        Edge("one", "two", ("up2", "down2_2")),
    )


@pytest.mark.parametrize("at", [("pool1",), ("down1.0", "middle.0"), ("down1", "pool2", "up2", "join2.0")])
def test_pieces_compute_what_the_model_does(at: tuple[str, ...]) -> None:
    model, x = SmallUNet().eval(), images(4)[0]
    pieces = cut(model, at)
    assert len(pieces) == len(at) + 1
    assert torch.equal(run_pieces(pieces, x), model(x))


def test_one_cut_may_be_given_as_a_string() -> None:
    one, two = cut(lenet((1, 8, 8), 10), "pool1"), cut(lenet((1, 8, 8), 10), ("pool1",))
    assert [p.inputs for p in one] == [p.inputs for p in two]


def test_the_state_dict_keeps_the_models_own_names() -> None:
    model = SmallUNet()
    pieces = cut(model, ("pool1", "up2"))
    names = [name for piece in pieces for name in piece.module.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    assert "down1.0.weight" in pieces[0].module.state_dict()
    assert "join1.bias" in pieces[2].module.state_dict()


def test_a_whole_models_state_goes_in_and_comes_out() -> None:
    topology, other, x = in_three(), SmallUNet().eval(), images(4)[0]
    topology.load_state_dict(other.state_dict())
    back = topology.state_dict()
    assert back.keys() == other.state_dict().keys()
    fresh = SmallUNet().eval()
    fresh.load_state_dict(back)
    assert torch.equal(fresh(x), other(x))
    pieces = tuple(Piece(s.module.eval(), s.inputs, s.outputs) for s in topology.segments)  # type: ignore[arg-type]
    assert torch.equal(run_pieces(pieces, x), other(x))


def test_the_model_given_is_not_altered() -> None:
    model = SmallUNet()
    state = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    modules = {name: id(m) for name, m in model.named_modules()}
    before = torch.get_rng_state()
    cut(model, ("pool1", "up2"))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert {name: id(m) for name, m in model.named_modules()} == modules
    assert all(m.training for m in model.modules())


def test_frozen_norms_of_the_model_stay_frozen() -> None:
    model = SmallUNet()
    model.down1[1].eval()
    before = {name: m.training for name, m in model.named_modules()}
    pieces = cut(model, ("pool1",))
    assert {name: m.training for name, m in model.named_modules()} == before
    assert not pieces[0].module.get_submodule("down1.1").training


class Constant(nn.Module):
    """Multiplies by a constant made in `forward`, as much code does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * torch.tensor(2.0))


def test_a_constant_made_in_forward_is_cut_and_not_left_in_the_model() -> None:
    model, x = Constant(), torch.rand(3, 4)
    attributes = set(vars(model))
    assert torch.equal(run_pieces(cut(model, ("a",)), x), model(x))
    assert set(vars(model)) == attributes


class DirectParameter(nn.Module):
    """Reads a parameter and a buffer of its own, without a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.full((4,), 3.0))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.scale + self.shift)


def test_parameters_read_directly_go_where_they_are_used() -> None:
    model, x = DirectParameter(), torch.rand(3, 4)
    bottom, top = cut(model, ("a",))
    assert set(bottom.module.state_dict()) == {"a.weight", "a.bias"}
    assert set(top.module.state_dict()) == {"b.weight", "b.bias", "scale", "shift"}
    assert torch.equal(run_pieces((bottom, top), x), model(x))


def test_builders_name_segments_roles_and_edges() -> None:
    one = vanilla(lenet((1, 8, 8), 10), "pool1")
    assert [(s.name, s.role) for s in one.segments] == [("bottom", "client"), ("top", "server")]
    assert [e.name for e in one.crossings] == ["bottom->top"]
    two = u_shaped(lenet((1, 8, 8), 10), ("conv2", "fc2"))
    assert [s.role for s in two.segments] == ["client", "server", "client"]
    assert [e.name for e in two.crossings] == ["bottom->middle", "middle->head"]
    assert (two.heads[0].role, two.heads[0].labels) == ("client", "client")


class ChannelsLast(nn.Module):
    """Scales every channel, with the channels last in memory, as ConvNeXt does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (x.permute(0, 2, 3, 1).contiguous() * self.weight).permute(0, 3, 1, 2)


def test_a_gradient_arrives_in_the_strides_in_which_it_was_computed() -> None:
    """The release has its channels last, its gradient first: the weight's gradient is summed in their order."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), ChannelsLast(), nn.Flatten(), nn.Linear(16 * 64, 4))
    assert len(cut(model, ("1",), images(8)[0])) == 2


class CopiedByItself(nn.ReLU):
    """Says of its copies that they were made here."""

    __module__ = "torch.nn"  # a trace keeps modules of torch whole, and looks into those of others
    made_here = False

    def __deepcopy__(self, memo: Any) -> CopiedByItself:
        made = CopiedByItself()
        made.made_here = True
        return made


class Unpickled(nn.ReLU):
    """Notes what `copy.deepcopy` hands to it."""

    __module__ = "torch.nn"
    handed: tuple[str, ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.handed = tuple(state)


def test_a_copy_of_a_piece_is_one_that_deepcopy_makes() -> None:
    """Everything of its own, weights that are shared still shared, and modules that copy in their own way do so."""
    layers = {"a": nn.Linear(4, 4), "own": CopiedByItself(), "state": Unpickled(), "norm": nn.BatchNorm1d(4)}
    model = nn.Sequential(OrderedDict(**layers, b=nn.Linear(4, 4), last=nn.Linear(4, 2)))
    model.b.weight = model.a.weight
    model.norm.notes = {"seen": [1, 2], "none": None}
    model.norm.register_forward_hook(note := lambda *_: None)
    piece = cut(model, "b")[0].module
    made = copy.deepcopy(piece)
    assert made.a.weight is made.b.weight
    assert made.own.made_here
    assert "_parameters" in made.state.handed
    assert made.norm.notes == {"seen": [1, 2], "none": None}
    assert made.norm.notes["seen"] is not model.norm.notes["seen"]
    assert list(made.norm._forward_hooks.values()) == [note]
    assert [n for n, _ in made.named_modules()] == [n for n, _ in piece.named_modules()]
    for (name, one), two in zip(piece.named_modules(), made.modules(), strict=True):
        assert type(one) is type(two)
        if name != "own":
            assert vars(one).keys() <= vars(two).keys(), name
        for member, value in vars(one).items():
            if isinstance(value, (dict, list, set)):
                assert type(vars(two)[member]) is type(value), (name, member)
                assert vars(two)[member] is not value, (name, member)
    for (name, one), two in zip(piece.state_dict().items(), made.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
        assert one.data_ptr() != two.data_ptr(), name
