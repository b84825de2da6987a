"""Copies of modules that share the memory of their weights, for who looks at a model and puts it back afterwards.

A model of real size is looked at a dozen times before it is trained; to copy its weights each time takes longer than to
run it, and more memory than to train it. A forward pass reads weights, as a rule, so that copies need not have their
own. Whether one has written into them shows in a sum over their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from splitfed.core.module_copies import copy_computed, deep_copy

LARGE = 2**24
"""From how many weights on a model is looked at with fewer rows."""
FEW_ROWS = 2
"""How many rows of an example show what a large model does with any."""
_ALIGNED = 64
T = TypeVar("T")


def is_large(model: nn.Module) -> bool:
    """Return whether `model` has so many weights that every pass through it counts."""
    return count_weights((model,)) >= LARGE


def count_weights(modules: Iterable[nn.Module]) -> int:
    """Return how many weights `modules` have together; those of several count once."""
    return sum(weight.numel() for weight in {id(w): w for module in modules for w in module.parameters()}.values())


def copy_sharing(modules: T) -> T:
    """Return a deep copy of a module, or a table of modules, whose weights lie in the same memory as the originals'.

    They are weights of their own otherwise, each with its own gradient and without hooks, as those of any copy. Copied
    are buffers, and weights that a copy would lay out in another way.
    """
    held: list[Any] = list(modules.values()) if isinstance(modules, Mapping) else [modules]
    memo: dict[int, Any] = {}
    for module in held:
        memo |= copy_computed(module)
        for weight in module.parameters():
            if _can_be_shared(weight):
                memo[id(weight)] = nn.Parameter(weight.data, weight.requires_grad)
    return deep_copy(modules, held, memo)


def share_modules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return copies by name whose weights lie in the same memory; see `copy_sharing`."""
    return copy_sharing(dict(modules))


def _can_be_shared(weight: Tensor) -> bool:
    """Return whether a copy of `weight` would lie in memory as it does."""
    if type(weight) is not nn.Parameter or weight.is_meta or weight.layout is not torch.strided or weight.is_quantized:
        return False
    return weight.data_ptr() % _ALIGNED == 0 and torch.empty_like(weight, device="meta").stride() == weight.stride()


def addresses(modules: Iterable[nn.Module]) -> frozenset[int]:
    """Return where in memory the weights of `modules` begin."""
    return frozenset(weight.data_ptr() for module in modules for weight in module.parameters()) - {0}


def weight_sums(model: nn.Module) -> list[int]:
    """Return for each weight of `model` a sum over its bytes, which is another one where they were written."""
    return [_sum_bytes(weight.detach()) for weight in model.parameters()]


def _sum_bytes(weight: Tensor) -> int:
    if weight.is_meta or weight.layout is not torch.strided or weight.is_quantized or not weight.numel():
        return 0
    flat = weight.reshape(-1)
    if flat.dtype in (torch.float32, torch.float64) and flat.nbytes % 8 == 0:
        # By far the fastest, as nothing is converted.
        return int(flat.view(torch.int64).sum())
    return int(flat.view(torch.uint8).sum())
