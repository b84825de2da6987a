"""What a cut that cannot be made is told as, where the cause is easily mistaken for another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.cutting import cut
from splitfed.core.equivalence_sides import StepResult
from splitfed.core.errors import InvalidInput
from splitfed.core.model_snapshot import generator_states
from splitfed.core.outcome_differences import Difference, check_same

ROWS = torch.linspace(-1.0, 1.0, 64).view(8, 8)


class Twice(nn.Module):
    """Returns one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layer(x)
        return z, z


class ReadsBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Twice(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.first(x)
        logits: Tensor = self.head(functional.dropout(one, 0.0, self.training) * other)
        return logits


def test_what_a_submodule_returns_twice_crosses_once() -> None:
    first, second = cut(ReadsBoth(), ("first",), ROWS)
    assert first.outputs == second.inputs
    assert len(first.outputs) == 1


class Blocks(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.share = nn.Linear(8, 4), share

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 0 or self.share < 1.0:
                x = functional.dropout(block(x), 0.0, self.training)
        logits: Tensor = self.head(x)
        return logits


def test_a_list_of_submodules_is_no_place_to_cut_at() -> None:
    with pytest.raises(InvalidInput, match=r"'blocks' is a ModuleList, which Blocks does not call.*'blocks\.0'"):
        cut(Blocks(0.0), ("blocks",), ROWS)


def test_a_block_that_was_left_out_is_told_as_one() -> None:
    with pytest.raises(InvalidInput, match=r"'blocks\.1' is not called by Blocks .*left out at random \(LayerDrop\)"):
        cut(Blocks(1.0), ("blocks.1",), ROWS)


def test_a_gradient_that_is_zero_but_for_rounding_is_not_blamed_on_hooks() -> None:
    """As that of the bias of keys in attention, which no output depends on."""
    gradients = {"layer.weight": torch.ones(4), "key.bias": torch.tensor([1e-9, -2e-9])}
    states = generator_states()
    uncut = StepResult(gradients=gradients, generators=states)
    other = StepResult(gradients={**gradients, "key.bias": torch.zeros(2)}, generators=states)
    with pytest.raises(Difference, match="by the rounding of what is zero in exact numbers") as found:
        check_same(uncut, other, ())
    assert "another order" in found.value.advice
    wrong = StepResult(gradients={**gradients, "key.bias": torch.ones(2)}, generators=states)
    with pytest.raises(Difference, match=r"the gradient of weight 'key\.bias' differs$") as found:
        check_same(uncut, wrong, ())
    assert "hooks" in found.value.advice
