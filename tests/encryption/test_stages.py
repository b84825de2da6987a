"""Stages of a segment that a server computes on ciphertexts: layers and squares, and what is none is one line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.encryption.stages import Square, read_stages


class Squared(nn.Module):
    """A linear layer, its square, and another linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 1) of (rows, 3)."""
        return self.second(self.first(x) ** 2)


class Failing(nn.Module):
    """Raises what no tracer does."""

    def forward(self, x: Tensor) -> Tensor:
        """Look for a key that is not there."""
        return {"a": x}["b"]


def test_layers_and_squares_are_found_with_their_own_weights() -> None:
    model = Squared()
    first, square, second = read_stages("top", model)
    assert isinstance(square, Square)
    x = torch.randn(4, 3)
    assert torch.equal(second(square(first(x))), model(x))
    assert {id(p) for stage in (first, second) for p in stage.parameters()} == {id(p) for p in model.parameters()}


def test_what_a_forward_raises_under_a_trace_is_named_with_its_kind() -> None:
    text = r"^segment 'top' cannot be evaluated on ciphertexts, as it cannot be traced: KeyError: 'b'$"
    with pytest.raises(InvalidInput, match=text):
        read_stages("top", Failing())
