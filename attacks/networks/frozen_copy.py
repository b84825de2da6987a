"""A frozen copy of an adversary's own segments that follows their training, to evaluate them on a release."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Segment


def run_segments(
    segments: Sequence[Segment], modules: Mapping[str, Callable[..., Any]], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return all values by name: those `given`, and the outputs of `segments`, run in order with their `modules`."""
    made = dict(given)
    for segment in segments:
        # A segment may begin with an operation in place, which must not change what the caller holds.
        result = modules[segment.name](*(made[name].clone() for name in segment.inputs))
        made.update(zip(segment.outputs, result if isinstance(result, (tuple, list)) else (result,), strict=True))
    return made


class FrozenCopy:
    """Runs copies of `segments`, in evaluation mode, from `value` to `out`, without gradients into the party's own."""

    def __init__(self, segments: tuple[Segment, ...], value: str, out: str) -> None:
        self._segments, self._value, self._out = segments, value, out
        made = {value, *(name for s in segments for name in s.outputs)}
        if lacking := [name for s in segments for name in s.inputs if name not in made]:
            raise InvalidInput(
                f"an attack that runs segment {segments[0].name!r} on rows of its own has no {lacking[0]!r} for them, "
                f"which arrives beside {value!r}: use one that learns from releases alone, such as fsha"
            )
        self._modules = {s.name: copy.deepcopy(s.module).eval().requires_grad_(False) for s in segments}

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Copy weights and buffers from `modules` as they are now."""
        for name, module in self._modules.items():
            module.load_state_dict(modules[name].state_dict())

    def __call__(self, z: Tensor) -> Tensor:
        """Return the segments' output for `z` (rows, ...), differentiable in z."""
        return run_segments(self._segments, self._modules, {self._value: z})[self._out]

    def to(self, device: object) -> FrozenCopy:
        """Move the copies to `device`."""
        for module in self._modules.values():
            module.to(device)  # type: ignore[call-overload]
        return self
