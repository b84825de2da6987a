"""Tensors that a module keeps as plain attributes and that were computed from its weights, such as a pruned weight.

`copy.deepcopy` refuses them, for their copies would be no results of the copied weights. Whoever computes them anew at
every call (`nn.utils.prune` and `nn.utils.weight_norm` do) never reads what is kept; whoever does not fails in the
uncut model, too, at its second backward pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def plain_copies(module: nn.Module, *, numbers: bool = True) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` with a copy of each such tensor in `module`, without its graph.

    `numbers`: False leaves their shapes alone, on the meta device.
    """
    return {
        id(value): value.detach().clone() if numbers else value.detach().to("meta")
        for inner in module.modules()
        for value in vars(inner).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
