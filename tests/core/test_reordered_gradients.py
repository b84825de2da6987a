"""Values that are read several times behind a cut: gradients of which weights may be rounded differently."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.reordered_gradients import reordered_weights
from tests.core.cut_idioms import Net, ends, leak


class Wired(nn.Module):
    """Linear layers, each of which reads the last value and some of those before; returns several values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        count = draw.randint(3, 7)
        self.reads = [[i, *(draw.randint(max(0, i - 3), i) for _ in range(draw.randint(0, 2)))] for i in range(count)]
        self.bent = [draw.random() < 0.5 for _ in range(count)]
        self.returned = sorted({count, *(draw.randint(1, count) for _ in range(draw.randint(0, 2)))})
        self.cuts = [f"ends.{i}" for i in sorted(draw.sample(range(count - 1), draw.randint(1, min(3, count - 1))))]
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.ends = nn.ModuleList(nn.Identity() for _ in range(count))

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for number, (reads, bent) in enumerate(zip(self.reads, self.bent, strict=True)):
            h = values[reads[0]]
            for other in reads[1:]:
                h = h * 0.7 + torch.sin(values[other]) if (other + number) % 2 else h + values[other]
            h = self.layers[number](h)
            values.append(self.ends[number](torch.tanh(h) if bent else h))
        found = tuple(values[number] for number in self.returned)
        return found if len(found) > 1 else found[0]


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.exhaustive)])
def test_models_that_read_values_often_and_return_several_are_cut(seeds: range) -> None:
    """All else is compared bit for bit, so that one weight too few, or one output, would be a refusal."""
    loose = 0
    for seed in seeds:
        model = Wired(seed)
        pieces = cut(model, model.cuts, torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)))
        assert pieces[0].original is not None
        loose += bool(reordered_weights(pieces[0].original))
    assert 0 < loose < len(seeds)


def several(m: Any, x: Tensor) -> Any:
    """Of `h`, which is returned, the gradients of three readers behind the cut are added there."""
    h = m.end(m.a(x))
    return m.c(m.b(h) + h * torch.sin(h)), h


def in_place(m: Any, x: Tensor) -> Any:
    """What is added to `h` in place comes from `b`."""
    h = m.a(x)
    h.add_(torch.tanh(m.b(x)))
    h = m.end(h)
    return m.c(h * torch.sin(h)), h


@pytest.mark.parametrize(
    ("forward", "at", "names"),
    [
        (several, "end", {"a.weight", "a.bias"}),
        (in_place, "end", {"a.weight", "a.bias", "b.weight", "b.bias"}),
        (lambda m, x: (m.c(m.b(m.end(m.a(x)))), m.a(x)), "end", set()),
        (ends, "a", set()),
    ],
)
def test_the_weights_behind_a_value_that_is_summed_in_another_order(forward: Any, at: str, names: set[str]) -> None:
    pieces = cut(Net(forward, end=nn.Identity()), at, torch.randn(8, 8))
    assert pieces[0].original is not None
    assert reordered_weights(pieces[0].original) == names


@pytest.mark.parametrize(
    ("weight", "factor", "refused"),
    [("c", 1 + 2.0**-20, True), ("b", 1 + 2.0**-20, True), ("a", 1 + 2.0**-20, False), ("a", 1 + 2.0**-10, True)],
)
def test_only_gradients_in_another_order_are_held_loosely(weight: str, factor: float, refused: bool) -> None:
    """The leak stays with the uncut model; of weights that are not behind the value, its last digits are seen."""
    model = Net(several, end=nn.Identity())
    leak(model.get_parameter(f"{weight}.weight"), factor)
    if refused:
        with pytest.raises(InvalidInput, match=rf"in training the gradient of weight '{weight}\.weight' differs"):
            cut(model, "end", torch.randn(8, 8))
    else:
        cut(model, "end", torch.randn(8, 8))


def test_two_outputs_alone_are_compared_bit_for_bit() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        h = torch.relu(m.a(x))
        return m.c(h), m.b(h)

    model = Net(forward)
    leak(model.a.weight, 1 + 2.0**-20)
    with pytest.raises(InvalidInput, match=r"the gradient of weight 'a\.weight' differs"):
        cut(model, "a", torch.randn(8, 8))


def test_a_comparison_that_ends_early_says_so() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.c(torch.sqrt(0 * m.b(m.a(x))))

    said = (
        r"Net was compared with its cut model for 0 of 5 batches only: its gradients are not finite in training with 8"
    )
    with pytest.warns(UserWarning, match=said):
        cut(Net(forward), "a", torch.randn(8, 8))
