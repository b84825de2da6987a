"""The backward pass as a party runs it: straight into torch's engine.

`torch.autograd.backward` first compares shapes by symbolic algebra and saves a context for compilers, which costs a
short step as much as all the rest of a cut. Here shapes are compared as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | float]) -> None:
    """Add to the gradient of every leaf behind `roots` what their `gradients` send back.

    A number stands for a root that is a loss: what that is multiplied by. Frees the graph behind the roots. Raises
    `ValueError` as `gradient_tensors` does.
    """
    given = tuple(gradient_tensors(roots, gradients))
    engine = Variable._execution_engine
    engine.run_backward(tuple(roots), given, False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradient_tensors(roots: Sequence[Tensor], gradients: Sequence[Tensor | float]) -> list[Tensor]:
    """Return the `gradients` of `roots` as tensors: a number is the weight of a loss.

    To weigh a loss there costs nothing; a multiplication would be a node in the graph. Raises `ValueError` for a
    gradient of another shape than its root, and for a loss of several numbers.
    """
    tensors = []
    for root, gradient in zip(roots, gradients, strict=True):
        if isinstance(gradient, Tensor):
            if gradient.shape != root.shape:
                raise ValueError(
                    f"a gradient of shape {tuple(gradient.shape)} is not allowed; expected {tuple(root.shape)}"
                )
            tensors.append(gradient)
        elif root.numel() != 1:
            raise ValueError(f"a loss of shape {tuple(root.shape)} is not allowed; expected a single number")
        else:
            tensors.append(torch.ones_like(root) if gradient == 1.0 else torch.full_like(root, gradient))
    return tensors
