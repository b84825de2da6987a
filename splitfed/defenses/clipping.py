"""What private releases share: clipping row by row, and keeping what comes before the mechanism from learning."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfed.errors import InvalidInput
from splitfed.graph import Topology


def clip_rows(z: Tensor, norm: float, order: int) -> Tensor:
    """Return `z` (batch, ...) with every row scaled down to L1 or L2 (`order`) norm `norm`, where it is longer.

    A row whose own norm is 0 stays as it is. The norm is taken in float64, so that rounding cannot exceed `norm` by
    more than the last digit of `z`.
    """
    lengths: Tensor = torch.linalg.vector_norm(z.flatten(1).double(), ord=order, dim=1)
    factors = (norm / lengths.clamp(min=norm)).to(z.dtype)
    clipped: Tensor = z * factors.view(-1, *[1] * (z.dim() - 1))
    return clipped


def frozen(topology: Topology, edges: tuple[str, ...]) -> Topology:
    """Return `topology` with all segments before `edges` frozen: no weight learns, no batch norm reads its batch.

    Raises `InvalidInput` for a segment that is a batch norm alone, which has nothing around it to stay in training.
    """
    wanted = {value for name in edges for value in topology.edge(name).values}
    segments = []
    for segment in reversed(topology.segments):
        if wanted.intersection(segment.outputs):
            wanted.update(segment.inputs)
            segment = replace(segment, module=_still(segment.name, segment.module))
        segments.append(segment)
    return replace(topology, segments=tuple(reversed(segments)))


def _still(name: str, module: nn.Module) -> nn.Module:
    made = copy.deepcopy(module).requires_grad_(False)
    made.train()
    for inner in made.modules():
        if isinstance(inner, nn.modules.batchnorm._BatchNorm) or getattr(inner, "track_running_stats", False):
            if inner is made:
                raise InvalidInput(f"segment {name!r} is one normalisation alone and cannot be frozen; cut elsewhere")
            inner.eval()
    return made
