"""Numbers that `forward` takes out of tensors of another party: guards, warnings, branches, and what is refused."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.topologies import multi_hop, u_shaped, vanilla
from tests.core.training_beside import built, check_trains_beside
from tests.thinning import thin

Change = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Layers a, b, c and d, with `change(model, x, h)` behind the first, of whose result a later party reads."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, size) for size in (8, 8, 8, 4))
        self.side, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("limit", torch.tensor(5.0))
        self.change, self.seen, self.hot = change, 0, False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.change(self, x, torch.tanh(self.a(x)))
        return {"logits": self.d(torch.tanh(self.c(torch.tanh(self.b(h)))))}


def net(change: Change) -> nn.Module:
    return built(Net, change)


def rows() -> Tensor:
    """Rows in batches of four: the second has a large number, the third a negative one alone, the fourth both."""
    x = torch.rand(16, 8, generator=torch.Generator().manual_seed(0))
    x[5, 2], x[9, 3], x[12, 1], x[14, 2] = 7.0, -3.0, 9.0, -4.0
    return x


def guarded(m: Any, x: Tensor, h: Tensor) -> Tensor:
    assert x.max() < 50, "too large"
    if torch.isnan(x).any() or not torch.isfinite(h).all():
        raise ValueError("not a number")
    if bool((x < -10).any()):
        raise KeyError("too small")
    return h


def warned(m: Any, x: Tensor, h: Tensor) -> Tensor:
    if (x > 5).any():
        warnings.warn("large", UserWarning, stacklevel=1)
    message = "contains 7" if 7.0 in x else ""
    return h + (0 if message is None else 1)


def branched(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.relu(h) if (x > 5).any() else h * 2


def scaled(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return h * (2.0 if (x > 5).any() else 3.0)


def nested(m: Any, x: Tensor, h: Tensor) -> Tensor:
    large, small = bool((x > 5).any()), bool((x < 0).any())
    if large and small:
        return h.clamp(-0.2, 0.2)
    return -h if small else h


def skipped(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return h if (x > 5).any() else m.norm(h)


def late(m: Any, x: Tensor, h: Tensor) -> Tensor:
    """Asks after the first cut of two."""
    h = m.side(h)
    return h.sigmoid() if h.max() > 0.6 else h


def filled(m: Any, x: Tensor, h: Tensor) -> Tensor:
    if (x > 5).any():
        h = h.clone()
        h[h > 0.1] = 0.1
    return h


def number(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return h / max(x.abs().max().item(), 2.0)


def by_buffer(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return h * 2 if m.limit > 3 else h


EXACT: dict[str, tuple[Change, int]] = {
    "guards": (guarded, 0),
    "warnings": (warned, 0),
    "branch": (branched, 1),
    "argument": (scaled, 1),
    "two_questions": (nested, 2),
    "a_layer_left_out": (skipped, 1),
    "number": (number, 1),
    "buffer": (by_buffer, 1),
}


@pytest.mark.parametrize("name", thin(EXACT, 4))
def test_it_trains_as_the_uncut_model_whatever_the_batches_answer(name: str) -> None:
    change, told = EXACT[name]
    model, x = net(change), rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A real number may be any of the rows.
        topology = vanilla(model, "b", example=x[:8], sent_inputs=("x",) if change is number else ())
        (edge,) = topology.crossings
        # A question that steers nothing but an error or a warning is nobody's but the holder's.
        assert len(edge.values) == 1 + told
        check_trains_beside(model, topology, {"x": x})


@pytest.mark.parametrize(
    ("builder", "change"), thin(itertools.product([u_shaped, multi_hop], [branched, nested, late]), 4)
)
def test_what_is_told_reaches_every_later_party(builder: Any, change: Change) -> None:
    model, x = net(change), rows()
    at = ("side", "c") if change is late else ("b", "c")
    check_trains_beside(model, builder(model, at, example=x[:8]), {"x": x})


LARGE = 0.6


def overwritten(m: Any, x: Tensor, h: Tensor) -> Tensor:
    h = m.side(h)
    return torch.nn.functional.relu(h, inplace=True) if h.max() > LARGE else h


def test_what_a_branch_may_overwrite_behind_the_cut_is_a_copy() -> None:
    model, x = net(overwritten), rows()
    topology = vanilla(model, "side", example=x[:2])
    facts = pass_example(topology, {"x": x[:2]})
    assert model.side(torch.tanh(model.a(x[:2]))).max() < LARGE < model.side(torch.tanh(model.a(x))).max()
    assert facts.overwritten["top"] == set(topology.segment("top").inputs)
    check_trains_beside(model, topology, {"x": x})


def test_what_another_party_has_overwritten_in_places_is_not_written_again() -> None:
    model, x = net(filled), rows()
    check_trains_beside(model, vanilla(model, "before:b", example=x[:8]), {"x": x})


def test_the_party_that_holds_the_rows_runs_the_check() -> None:
    x = rows()
    for row, error, text in ((60.0, AssertionError, "too large"), (-20.0, KeyError, "too small")):
        bad = x.clone()
        bad[6, 1] = row
        model = net(guarded)
        with pytest.raises(error, match=text):
            check_trains_beside(model, vanilla(model, "b", example=x[:8]), {"x": bad})


def fails_on_the_example_alone(m: Any, x: Tensor, h: Tensor) -> Tensor:
    if (x > 5).any():
        return h + x[x > 5][0]
    return h


def test_an_answer_that_no_way_is_planned_for_stops_the_run() -> None:
    model, x = net(fails_on_the_example_alone), rows()
    with pytest.raises(InvalidInput, match="forward of Net takes another way than when it was cut"):
        check_trains_beside(model, vanilla(model, "b", example=x[:4]), {"x": x})


def remembered(m: Any, x: Tensor, h: Tensor) -> Tensor:
    if (x > 50).any():
        m.hot = True
    return -h if m.hot else h


def by_weight(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return h * m.limit.item()


def sometimes(m: Any, x: Tensor, h: Tensor) -> Tensor:
    m.extra = None if (x > 5).any() else m.side(x)
    return h


def by_length(m: Any, x: Tensor, h: Tensor) -> Tensor:
    for _ in range(int(x.max().item())):
        h = h * 0.5
    return h


def by_many(m: Any, x: Tensor, h: Tensor) -> Tensor:
    for column in x.unbind(1):
        h = h * 0.5 if (column > 5).any() else h
    return h


REFUSED: dict[str, tuple[Change, str]] = {
    "state": (remembered, "changes the attribute 'hot'"),
    "weight": (by_weight, "takes a number out of 'limit', a weight or buffer"),
    "length": (by_length, "ask the tensor a question that is true or false"),
    "too_many": (by_many, "more than 24 ways through its forward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_number_may_not_steer_is_refused_in_one_line(name: str) -> None:
    change, text = REFUSED[name]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        vanilla(net(change), "b", example=rows()[:8])
    assert "\n" not in str(caught.value)


class Sometimes(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.a(x))
        extra = self.side(x) if (x > 5).any() else None
        h = torch.tanh(self.b(h))
        return {"logits": self.d(self.c(h) if extra is None else self.c(h) + extra)}


def test_what_learns_and_crosses_in_some_batches_alone_is_refused() -> None:
    with pytest.raises(InvalidInput, match="value 'side' of Sometimes crosses in some batches only"):
        vanilla(built(Sometimes, branched), "b", example=rows()[:8])
