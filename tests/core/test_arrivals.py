"""Values that share memory (`expand`, `unfold`) arrive as they were: alike in memory, with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.example_pass import pass_example
from splitfed.core.messages import LocalLink, Message, Stamp
from splitfed.core.payload import Layout
from splitfed.core.traffic import Traffic
from splitfed.costs.bytes import forward_bytes
from splitfed.engines.wire_format import ByteLink
from tests.core.cut_idioms import Net
from tests.core.idioms import Idiom, build, check_training, rows, topology_of
from tests.examples import engine_of
from tests.predicted_bytes import backward_bytes
from tests.thinning import thin


def repeated(m: Any, x: Tensor) -> Tensor:
    """Return what a mean makes of 33 equal tokens: its sum takes equal memory another way than equal numbers."""
    return m.c(m.mark(m.a(x).unsqueeze(1).expand(-1, 33, -1)).mean(1))


def windows(m: Any, x: Tensor) -> Tensor:
    """Return a mean over windows that overlap."""
    return m.c(m.mark(m.a(x).repeat(1, 5).unfold(1, 8, 1)).mean(1))


def shared_keys(m: Any, x: Tensor) -> Tensor:
    """Attend with one head of keys and values for four heads of queries; the keys cross."""
    q = m.a(x).unflatten(1, (1, 4, 2)).movedim(1, 2).expand(-1, -1, 7, -1)
    k = m.mark(m.b(x).view(-1, 1, 4, 2).repeat(1, 1, 2, 1)[:, :, :7].expand(-1, 4, -1, -1))
    return m.c(functional.scaled_dot_product_attention(q * 2, k, k).mean(2).flatten(1))


def queries(m: Any, x: Tensor) -> Tensor:
    """Let queries that are the same for every row look at it."""
    q = m.queries.expand(x.shape[0], -1, -1) * 1
    memory = m.mark(m.a(x).unsqueeze(1).expand(-1, 17, -1))
    return m.c(m.attention(q, memory, memory)[0].mean(1))


def position_bias(m: Any, x: Tensor) -> Tensor:
    """Add what is computed from weights alone on both sides of a cut."""
    p = torch.tanh(m.bias)
    h = m.mark(m.a(x) + p.mean(0))
    return m.c((h.unsqueeze(1) + p).tanh().mean(1))


MADE: dict[str, tuple[Any, Any]] = {
    "repeated": (repeated, dict),
    "windows": (windows, dict),
    "shared_keys": (shared_keys, dict),
    "queries": (
        queries,
        lambda: {
            "queries": nn.Parameter(torch.randn(5, 8)),
            "attention": nn.MultiheadAttention(8, 2, batch_first=True),
        },
    ),
    "position_bias": (position_bias, lambda: {"bias": nn.Parameter(torch.randn(33, 8))}),
}


def idiom(name: str, replayed: bool) -> Idiom:
    run, extra = MADE[name]

    def forward(m: Any, x: Tensor) -> Tensor:
        found: Tensor = run(m, x + 1 if replayed and not m.training else x)
        return found

    return Idiom(lambda: Net(forward, mark=nn.Identity(), **extra()), at=("mark",), replayed=replayed)


CASES = [(name, replayed) for name in MADE for replayed in (False, True) if replayed or name != "position_bias"]


@pytest.mark.parametrize(("name", "replayed"), thin(CASES, 3))
def test_what_shares_memory_trains_as_in_the_uncut_model(name: str, replayed: bool) -> None:
    check_training(idiom(name, replayed))


@pytest.mark.parametrize("name", ["repeated", "position_bias"])
@pytest.mark.parametrize("link", [LocalLink, ByteLink])
def test_bytes_are_those_of_all_numbers_and_memory_is_that_of_distinct_ones(link: type[LocalLink], name: str) -> None:
    case = idiom(name, replayed=True)
    topology = topology_of(case, build(case), rows(case, 24))
    facts = pass_example(topology, {"x": rows(case, 4)})
    engine = engine_of(topology, rows(case, 24), torch.arange(24) % 4, link=link)
    places: list[tuple[int, int]] = []
    server = engine.parties["server"].state.modules
    next(iter(server.values())).register_forward_pre_hook(
        lambda _, given: places.append((given[-1].untyped_storage().nbytes(), given[-1].nbytes))
    )
    engine.train(0, 0, [torch.arange(8)])
    assert engine.traffic.bytes(kind="activation") == forward_bytes(topology, facts, 8)
    assert engine.traffic.bytes(kind="gradient") == backward_bytes(topology, facts, 8)
    assert places
    assert all(memory < counted / 4 for memory, counted in places)


SHAPES: dict[str, Tensor] = {
    "expanded": torch.arange(12.0).view(2, 1, 6).expand(2, 5, 6),
    "expanded_part": torch.arange(24.0).view(2, 2, 6)[:, :1, 1:4].expand(2, 5, 3),
    "windows": torch.arange(24.0).view(2, 12).unfold(1, 4, 2),
    "windows_of_rows": torch.arange(12.0).unfold(0, 4, 1).unsqueeze(1).expand(-1, 3, -1),
    "one_number": torch.ones(()).expand(3, 4),
    "whole_numbers": torch.arange(3).expand(4, 3),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("link", [LocalLink, ByteLink])
def test_a_copy_is_laid_out_as_what_was_sent(link: type[LocalLink], name: str) -> None:
    sent = SHAPES[name]
    message = Message("client0", "server", "activation", "bottom->top", {"z": sent}, Stamp("train", 0, 0, 0))
    arrived = link(Traffic(), {}).deliver(message)
    assert arrived.nbytes == sent.nbytes
    assert arrived.layouts is not None
    used = arrived.layouts["z"].lay_out(arrived.tensors["z"])
    assert used.stride() == sent.stride()
    assert used.data_ptr() % 64 == sent.data_ptr() % 64
    assert torch.equal(used, sent)
    assert used.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr()


def test_numbers_that_are_no_longer_equal_arrive_as_they_are() -> None:
    """Somebody who tampers with a message is not undone by the memory that it lay in."""
    tampered = torch.arange(6.0).view(2, 3)
    assert torch.equal(Layout((1, 0), 0).lay_out(tampered), tampered)
    assert torch.equal(Layout((1, 1), 0).lay_out(tampered), tampered)
