"""Shared by private releases: clipping of rows, noise, and freezing of the segments before the mechanism."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.payload import without_infinite_rows
from splitfed.core.rows import flat_rows
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.private_noise import check_precision


def clip_rows(z: Tensor, norm: float, order: int) -> Tensor:
    """Return `z` (batch, ...) with every row scaled down to L1 or L2 (`order`) norm `norm` if it is longer.

    A zero row is unchanged; a row with a number that is not finite becomes zeros. The norm is computed in float64, so
    that rounding cannot exceed `norm` by more than the last digit of `z`.
    """
    z = without_infinite_rows(z)
    lengths: Tensor = torch.linalg.vector_norm(flat_rows(z).double(), ord=order, dim=1)
    factors = (norm / lengths.clamp(min=norm)).to(z.dtype)
    return z * factors.view(-1, *[1] * (z.dim() - 1))


def noisy_release(
    z: Tensor,
    clipped: Tensor,
    add_noise: Callable[[Tensor, float, float, int, torch.Generator], Tensor],
    sensitivity: float,
    multiplier: float,
    random: torch.Generator,
) -> Tensor:
    """Return the float64 rows `clipped` plus noise, in the dtype of `z`, with the gradient of the clipped rows.

    `add_noise`: from `splitfed.defenses.private_noise`, which defines `sensitivity` and `multiplier`.
    """
    noisy = add_noise(clipped.detach(), sensitivity, multiplier, math.prod(z.shape[1:]), random)
    # The difference is zero: it carries the gradient alone.
    return noisy.detach().to(z.dtype) + (clipped - clipped.detach()).to(z.dtype)


def check_values(name: str, topology: Topology, facts: TopologyFacts, edges: tuple[str, ...]) -> None:
    """Raise `InvalidInput` for the defense `name` on `edges` that carry half precision, or a value without rows."""
    for edge in edges:
        for value in facts.data(topology.edge(edge).values):
            check_precision(name, f"{value!r} on {edge}", facts.dtypes[value])
            if value in facts.repeated:
                raise InvalidInput(
                    f"{name} clips rows, and {value!r} on {edge} has none: it is one tensor of shape "
                    f"{facts.shapes[value]} for the whole batch, shared by all rows; compute it behind the cut, "
                    "or for each row separately"
                )


def freeze_segments(topology: Topology, edges: tuple[str, ...]) -> Topology:
    """Return `topology` with all segments before `edges` frozen: no weight or batch norm statistic changes.

    Raises `InvalidInput` for a segment that consists of one batch norm, which has no enclosing module to wrap.
    """
    guarded = {value for name in edges for value in topology.edge(name).values}
    segments = []
    for segment in reversed(topology.segments):
        if guarded.intersection(segment.outputs):
            guarded.update(segment.inputs)
            segment = replace(segment, module=_freeze_module(segment.name, segment.module))
        segments.append(segment)
    return replace(topology, segments=tuple(reversed(segments)))


def _freeze_module(name: str, module: nn.Module) -> nn.Module:
    made = copy.deepcopy(module).requires_grad_(False)
    made.train()
    for inner in made.modules():
        if isinstance(inner, nn.modules.batchnorm._BatchNorm) or getattr(inner, "track_running_stats", False):
            if inner is made:
                raise InvalidInput(f"segment {name!r} is one normalisation alone and cannot be frozen; cut elsewhere")
            inner.eval()
    return made
