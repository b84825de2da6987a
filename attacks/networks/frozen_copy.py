"""A frozen copy of an adversary's own segments, kept equal to the ones in training: what they make of a release."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from splitfed.core.topology import Segment


class FrozenCopy:
    """Runs copies of `segments`, in evaluation mode, from `value` to `out`; nothing flows into the party's own."""

    def __init__(self, segments: tuple[Segment, ...], value: str, out: str) -> None:
        self._segments, self._value, self._out = segments, value, out
        self._modules = {s.name: copy.deepcopy(s.module).eval().requires_grad_(False) for s in segments}

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Take over weights and buffers of `modules` as they are now."""
        for name, module in self._modules.items():
            module.load_state_dict(modules[name].state_dict())

    def __call__(self, z: Tensor) -> Tensor:
        """Return what the segments make of `z` (rows, ...), differentiable in z."""
        made = {self._value: z}
        for segment in self._segments:
            # An operation in place must not change what the caller holds.
            result = self._modules[segment.name](*(made[name].clone() for name in segment.inputs))
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            made.update(zip(segment.outputs, outputs, strict=True))
        return made[self._out]

    def to(self, device: object) -> FrozenCopy:
        """Move the copies to `device`."""
        for module in self._modules.values():
            module.to(device)  # type: ignore[call-overload]
        return self
