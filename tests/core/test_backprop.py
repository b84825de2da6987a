"""The engine is entered directly: what comes out is what `torch.autograd.backward` gives, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from splitfed.core.party import run_backward
from splitfed.core.random import generator


def _graph(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor | float]]:
    x = torch.randn(6, 4, generator=generator(1))
    z = model(x)
    return [z, z.square().mean(), z.exp().mean()], [torch.randn(6, 3, generator=generator(2)), 1.0, 0.3]


def test_equals_torch_and_frees_the_graph() -> None:
    ours = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    theirs = copy.deepcopy(ours)
    for _ in range(2):
        # Twice: gradients add up.
        roots, gradients = _graph(ours)
        run_backward(roots, gradients)
        (z, *losses), (gradient, *weights) = _graph(theirs)
        weighed = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
        torch.autograd.backward([z, *weighed], [gradient, None, None])
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(roots, gradients)


def test_wrong_shapes_are_refused() -> None:
    z = nn.Linear(4, 3)(torch.ones(6, 4))
    # One row would be taken for the sum over all of them.
    with pytest.raises(ValueError, match=r"gradient of shape \(1, 3\) is not allowed; expected \(6, 3\)"):
        run_backward([z], [torch.ones(1, 3)])
    with pytest.raises(ValueError, match=r"loss of shape \(6, 3\) is not allowed; expected a single number"):
        run_backward([z], [0.5])
