"""Operations and memory of a step, by hand."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Head, Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.measure import SegmentCost, role_flops, segment_flops
from splitfed.costs.memory import RoleMemory, optim_copies, role_memory
from splitfed.topologies import u_shaped, vanilla
from tests.examples import Dropped, InPlaceAfterCut, SmallUNet


def facts_of(topology: Topology, *shape: int) -> TopologyFacts:
    return pass_example(topology, {v: torch.rand(2, *shape) for v in topology.inputs})


def two_layers() -> Topology:
    return vanilla(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), "1")


def local_loss(aux: nn.Module | None = None) -> Topology:
    """The client learns from a head of its own; no gradient comes back over bottom->top."""
    segments = (
        Segment("bottom", "client", nn.Linear(4, 3), ("x",), ("z",)),
        Segment("aux", "client", nn.Linear(3, 2) if aux is None else aux, ("z",), ("attack",)),
        Segment("top", "server", nn.Linear(3, 5), ("z",), ("out",)),
    )
    heads = (Head("attack", "client", "client"), Head("out", "server", "client"))
    return Topology("local", segments, {"x": "client"}, heads, frozenset({"bottom->top"}))


def test_linear_layers_by_hand() -> None:
    """2mn a row for the product; twice that on the way back where the input needs a gradient, once where it is data."""
    topology = two_layers()
    found = segment_flops(topology, facts_of(topology, 4))
    assert found == {"bottom": SegmentCost(24, 24), "top": SegmentCost(12, 24)}
    assert role_flops(topology, facts_of(topology, 4)) == {"client": 48, "server": 36}


def test_a_step_of_several_rows_is_as_many_times_one() -> None:
    topology = two_layers()
    assert segment_flops(topology, facts_of(topology, 4), 10) == {
        "bottom": SegmentCost(240, 240),
        "top": SegmentCost(120, 240),
    }


def test_a_convolution_by_hand() -> None:
    """6 filters of 1x3x3 at 64 places: 2 * 6 * 9 * 64; its input is data. Then 96 -> 16 -> 10."""
    topology = vanilla(InPlaceAfterCut(), "conv")
    found = segment_flops(topology, facts_of(topology, 1, 8, 8))
    assert found["bottom"] == (6912, 6912)
    assert found["top"] == (2 * (96 * 16 + 16 * 10), 4 * (96 * 16 + 16 * 10))


def test_no_gradient_over_a_forward_only_edge() -> None:
    """The server's input asks for no gradient, so its way back costs as much as its way forward; aux has both."""
    topology = local_loss()
    found = segment_flops(topology, facts_of(topology, 4))
    assert found == {"bottom": SegmentCost(24, 24), "aux": SegmentCost(12, 24), "top": SegmentCost(30, 30)}


def test_what_nobody_learns_from_has_no_way_back() -> None:
    """Without a head of its own, a bottom whose only edge is forward-only gets no gradient at all."""
    segments = (
        Segment("bottom", "client", nn.Linear(4, 3), ("x",), ("z",)),
        Segment("top", "server", nn.Linear(3, 5), ("z",), ("out",)),
    )
    heads = (Head("out", "server", "client"),)
    topology = Topology("frozen", segments, {"x": "client"}, heads, frozenset({"bottom->top"}))
    assert segment_flops(topology, facts_of(topology, 4))["bottom"] == SegmentCost(24, 0)


def test_frozen_weights_save_their_gradient() -> None:
    topology = two_layers()
    topology.segment("top").module.requires_grad_(False)
    assert segment_flops(topology, facts_of(topology, 4))["top"] == SegmentCost(12, 12)
    topology.segment("bottom").module.requires_grad_(False)
    assert segment_flops(topology, facts_of(topology, 4))["bottom"] == SegmentCost(24, 0)


def test_words_are_inputs_too() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    topology = vanilla(model, "0")
    facts = pass_example(topology, dict.fromkeys(topology.inputs, torch.zeros(2, 3, dtype=torch.int64)))
    assert segment_flops(topology, facts)["top"] == SegmentCost(48, 96)


@pytest.mark.parametrize("model", [SmallUNet(), Dropped(), InPlaceAfterCut()], ids=lambda m: type(m).__name__)
def test_modules_and_random_state_are_left_alone(model: nn.Module) -> None:
    cut = {"SmallUNet": "pool1", "Dropped": "drop2", "InPlaceAfterCut": "conv"}[type(model).__name__]
    topology = vanilla(model.eval(), cut)
    facts = facts_of(topology, 1, 8, 8)
    modules = {s.name: s.module for s in topology.segments}
    modes = [part.training for m in modules.values() for part in m.modules()]
    before, random = copy.deepcopy(topology.state_dict()), torch.get_rng_state()
    segment_flops(topology, facts)
    role_memory(topology, facts, 5, 1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[n], t) for n, t in topology.state_dict().items())
    assert all(p.grad is None for m in modules.values() for p in m.parameters())
    assert [part.training for m in modules.values() for part in m.modules()] == modes


def test_frozen_parts_stay_frozen() -> None:
    """Batch norm in evaluation mode takes a single row; it must not be switched to training."""

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.norm = nn.BatchNorm1d(2)

        def forward(self, z: Tensor) -> Tensor:
            seen.append((self.training, self.norm.training))
            return self.norm(self.fc(z))

    seen: list[tuple[bool, bool]] = []
    topology = local_loss(Watching())
    topology.segment("aux").module.norm.eval()
    facts = facts_of(topology, 4)
    seen.clear()
    segment_flops(topology, facts)
    assert seen == [(True, False)]
    topology.segment("aux").module.eval()
    segment_flops(topology, facts)
    assert seen[1:] == [(True, True)]


def test_a_unet_whose_skips_cross_twice() -> None:
    """The uncut model costs as much as its pieces, but for gradients of inputs that stay within it."""
    topology = u_shaped(SmallUNet(), ("pool1", "up2"))
    pieces = segment_flops(topology, facts_of(topology, 1, 8, 8))
    whole = Topology(
        "whole", (Segment("all", "one", SmallUNet(), ("x",), ("out",)),), {"x": "one"}, (Head("out", "one", "one"),)
    )
    uncut = segment_flops(whole, facts_of(whole, 1, 8, 8))["all"]
    assert sum(c.forward for c in pieces.values()) == uncut.forward
    assert sum(c.backward for c in pieces.values()) == uncut.backward


def test_memory_of_two_layers_by_hand() -> None:
    """Client: 15 weights; a row keeps x (4) and relu's result (3), which needs no more of the product."""
    topology = two_layers()
    found = role_memory(topology, facts_of(topology, 4), 10, {"client": 2, "server": 0})
    assert found["client"] == RoleMemory(60, 60, 120, 10 * 4 * (4 + 3))
    # Server: 8 weights; a row keeps what it received (3) and its scores (2).
    assert found["server"] == RoleMemory(32, 32, 0, 10 * 4 * (3 + 2))
    assert found["server"].total == 32 + 32 + 200


def test_memory_grows_by_the_row_over_what_does_not() -> None:
    """Batch norm keeps the mean and deviation of each of its 3 channels, once a batch; buffers are no activations."""
    topology = vanilla(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), "1")
    facts = facts_of(topology, 4)
    one, ten = (role_memory(topology, facts, rows, 0)["client"] for rows in (1, 10))
    # A row: x (4), the product (3) and its normalised values (3).
    assert one.activations == 4 * (4 + 3 + 3) + 4 * 6
    assert ten.activations == 10 * 4 * (4 + 3 + 3) + 4 * 6
    # 15 + 6 weights; running mean and variance (6) and a counter of 8 bytes beside them.
    assert one[:3] == (4 * 21 + 4 * 6 + 8, 4 * 21, 0)


def test_tied_and_frozen_weights_are_counted_as_they_are() -> None:
    topology = local_loss()
    topology.segment("bottom").module.requires_grad_(False)
    found = role_memory(topology, facts_of(topology, 4), 2, 1)["client"]
    assert found[:3] == (4 * (15 + 8), 4 * 8, 4 * 8)


@pytest.mark.parametrize(
    ("optim", "copies"),
    [
        (Optim("SGD", {"lr": 0.1}), 0),
        (Optim("SGD", {"lr": 0.1, "momentum": 0.9}), 1),
        (Optim("RMSprop", {"lr": 0.1}), 1),
        (Optim("Adam", {}), 2),
        (Optim("AdamW", {"amsgrad": True}), 3),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_copies_that_an_optimizer_keeps(optim: Optim, copies: int) -> None:
    assert optim_copies(optim) == copies


def test_bad_input_is_named() -> None:
    topology = two_layers()
    facts = facts_of(topology, 4)
    for make, text in (
        (lambda: segment_flops(topology, facts, 0), "rows=0 is not allowed"),
        (lambda: role_memory(topology, facts, 0, 1), "batch_size=0 is not allowed"),
        (lambda: role_memory(topology, facts, 1, -1), "optim_copies of role 'client'=-1 is not allowed"),
        (lambda: role_memory(topology, facts, 1, {"client": 1}), "role in optim_copies: nothing is said of 'server'"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(text)):
            make()


def test_numbers_that_a_sparse_tensor_keeps_are_counted_once() -> None:
    """Edges of a graph, saved for the way back: indices of 2 x 3 in 8 bytes and 3 numbers in 4, beside z, and out."""

    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges = torch.eye(3).to_sparse().coalesce()

        def forward(self, z: Tensor) -> Tensor:
            return (self.edges @ z.T).T

    segments = (
        Segment("bottom", "client", nn.Linear(4, 3), ("x",), ("z",)),
        Segment("top", "server", nn.Sequential(Edges(), nn.Linear(3, 2)), ("z",), ("out",)),
    )
    topology = Topology("graph", segments, {"x": "client"}, (Head("out", "server", "client"),))
    found = role_memory(topology, facts_of(topology, 4), 10, 0)["server"]
    # Of 10 rows: z and what the edges make of it, 3 numbers each, and 2 of out.
    assert found.activations == (2 * 3 * 8 + 3 * 4) + 10 * (3 + 3 + 2) * 4
