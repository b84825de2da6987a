"""Memory that constants made (zeros, ones) and that a batch is written into before a cut is what it holds then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.core.tracing import PieceModule
from splitfed.topologies import multi_hop, u_shaped, vanilla
from tests.core.training_beside import built, check_trains_beside

ROWS = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Between = Callable[["Gated", Tensor, Tensor, Tensor], Tensor]


class Gated(nn.Module):
    """Rows to four logits, with a side branch that opens after the second step: what is written before is zeros.

    No comparison of the cut with the uncut model in one batch sees whether that branch is there.
    """

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.a, self.k, self.q, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.between, self.kept = between, torch.zeros(4, 8)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        out: Tensor = self.c(self.between(self, x, self.a(x), (self.steps > 2).float()))
        return out


def made_of_it(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.zeros_like(h)
    o[:, :4] = h[:, :4] * gate
    z = o.relu()
    return z + net.k(h)


def itself_and_before(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.zeros_like(h)
    was = o + 1
    o[:, :4] = h[:, :4] * gate
    return net.k(h) + o + was


def by_a_view_of_before(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.ones(len(x), 8)
    u = o[:, :4]
    u += h[:, :4] * gate
    return o.relu() + net.k(h)


def by_data(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.zeros_like(h)
    o.data[:, :4] = (h[:, :4] * gate).detach()
    return o.view(-1, 8) + net.k(h)


def written_on(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o, p = torch.zeros_like(h), x.new_zeros(len(x), 8)
    for place in range(4):
        o[:, place] = h[:, : place + 1].mean(1) * gate
    p[:] = o
    return p.sum(1, keepdim=True) + net.k(h)


def asked(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.zeros_like(h)
    o[:] = h * gate
    return (o * 2 if o.abs().max() > 0 else o) + net.k(h)


def asked_of_numbers(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.zeros_like(h)
    o[:] = h
    return (o * 2 if o.abs().max() > 0 else o.tanh()) + net.k(h)


class Copied(torch.autograd.Function):
    """Writes one tensor into another, to which it sends no gradient."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, h: Tensor) -> Tensor:
        ctx.mark_dirty(o)
        o.copy_(h)
        return o

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def by_own_function(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.zeros_like(h)
    o = Copied.apply(o, h * gate)  # type: ignore[no-untyped-call]
    k = net.k(h)
    return o.relu() + k


def between_the_cuts(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    k = net.k(h)
    o = x.new_zeros(len(x), 8)
    o[:, :4] = k[:, :4] * gate
    return net.q(k) + o * 2


def on_both_sides(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.zeros(len(x), 8)
    o[:, :2] = h[:, :2] * gate
    k = net.k(h)
    o[:, 2:4] = k[:, 2:4] * gate
    q = net.q(k)
    o[:, 4:] = q[:, 4:]
    return o.relu()


def constant(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    mask = torch.zeros(8, 8)
    mask[:, 3:] = -1.0
    return net.k(h) @ mask + h @ mask.relu()


WRITTEN = (
    made_of_it,
    itself_and_before,
    by_a_view_of_before,
    by_data,
    written_on,
    asked,
    asked_of_numbers,
    constant,
)
WAYS: dict[str, Callable[[nn.Module], Topology]] = {
    "a client and a server": lambda model: vanilla(model, "k", example=ROWS[:8]),
    "both ends": lambda model: u_shaped(model, ("a", "q"), example=ROWS[:8]),
    "a chain": lambda model: multi_hop(model, ("k", "q"), example=ROWS[:8]),
}


@pytest.mark.parametrize(
    ("between", "way"),
    [
        *((between, "a client and a server") for between in WRITTEN),
        *((between, way) for between in (between_the_cuts, on_both_sides) for way in ("both ends", "a chain")),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_what_is_written_into_a_constant_reaches_whoever_reads_it(between: Between, way: str) -> None:
    model = built(Gated, between)
    check_trains_beside(copy.deepcopy(model), WAYS[way](model), {"x": ROWS})


def as_it_was(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    o = torch.zeros_like(h)
    was = o + 1
    k = net.k(h)
    o[:, :4] = k[:, :4] * gate
    return net.q(k) + o + was


def read_elsewhere(net: Gated, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
    net.kept[:] = (h.mean(0) * gate).detach()
    return net.q(net.k(h)) + net.kept[0]


@pytest.mark.parametrize(
    ("between", "text"),
    [
        (as_it_was, "overwrites in place what is read after a cut .* or as it was before"),
        (read_elsewhere, "changes in place a tensor that is kept beside the state"),
    ],
)
def test_a_constant_that_others_have_made_is_not_written_into(between: Between, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        multi_hop(built(Gated, between), ("k", "q"), example=ROWS[:8])


def test_a_function_that_sends_no_gradient_to_what_arrived_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a function with a backward of its own sends no gradient back to what"):
        vanilla(built(Gated, by_own_function), "k", example=ROWS[:8])


class Added(Gated):
    """Adds in place to what nobody reads by another name, and to a plain number that is read before and after."""

    def forward(self, x: Tensor) -> Tensor:
        h, width = self.a(x), x.shape[1]
        wider, more = width, h * 2
        wider += 2
        more += h[:, :wider] / width
        out: Tensor = self.c(self.k(h) + more)
        return out


def test_a_sum_in_place_that_nobody_reads_by_another_name_is_traced() -> None:
    pieces = cut(built(Added, constant), ("k",), ROWS[:8])
    assert all(isinstance(piece.module, PieceModule) for piece in pieces)
