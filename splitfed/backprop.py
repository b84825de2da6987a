"""The backward pass as a party runs it: straight into torch's engine.

`torch.autograd.backward` first compares shapes by symbolic algebra and saves a context for compilers, which costs a
short step as much as all the rest of a cut. Here shapes are compared as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable


def send_back(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add to the gradient of every leaf behind `roots` what their `gradients` send back (None: the root is a loss).

    Frees the graph behind them. Raises `ValueError` for a gradient of another shape than its root, and for a root of
    several numbers without one.
    """
    given = []
    for root, gradient in zip(roots, gradients, strict=True):
        if gradient is None:
            if root.numel() != 1:
                raise ValueError(f"a loss of shape {tuple(root.shape)} is not allowed; expected a single number")
            given.append(torch.ones_like(root))
        else:
            if gradient.shape != root.shape:
                raise ValueError(
                    f"a gradient of shape {tuple(gradient.shape)} is not allowed; expected {tuple(root.shape)}"
                )
            given.append(gradient)
    engine = Variable._execution_engine
    engine.run_backward(tuple(roots), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True)
