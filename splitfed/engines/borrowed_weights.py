"""Modules with temporarily replaced weights, and restoration of modules after a block."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from splitfed.core.topology import weights


@contextmanager
def preserve_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore buffers, also replaced ones, and remove gradients at the end of the block, also after an exception."""
    inner = {id(m): m for module in modules for m in module.modules()}.values()
    saved = [(m, {name: None if b is None else b.clone() for name, b in m._buffers.items()}) for m in inner]
    try:
        yield
    finally:
        for module, buffers in saved:
            module._buffers.update(buffers)
        for module in modules:
            module.zero_grad(set_to_none=True)


def with_tensors(own: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """Return modules like `own` in which `tensors`, named `segment/name`, replace the tensors of the same names.

    Weights are not copied, buffers are: the modules are not trained, but a forward pass may change statistics.
    """
    memo: dict[int, Any] = {}
    for segment, module in own.items():
        for name, weight in module.named_parameters(remove_duplicate=False):
            tensor = tensors.get(f"{segment}/{name}", weight).detach().to(weight.device)
            memo[id(weight)] = nn.Parameter(tensor, weight.requires_grad)
    # Copied together, so that weights shared between segments of a party stay shared.
    modules = copy.deepcopy(dict(own), memo)
    for segment, module in modules.items():
        for name, buffer in module.named_buffers():
            if f"{segment}/{name}" in tensors:
                buffer.copy_(tensors[f"{segment}/{name}"])
    return modules


def with_weights(own: Mapping[str, nn.Module], lent: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return copies of `own`, with its buffers, in which the weights are those of `lent`."""
    made = copy.deepcopy(dict(own))
    for name, module in made.items():
        module.load_state_dict({**module.state_dict(), **weights(lent[name])})
    return made
