"""The weighted mean of several parties' tensors, gathered one party at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


class RunningMean:
    """Adds up `share * tensor` in double precision; a single part of share 1 comes back bit for bit.

    Whole numbers (a batch norm's count of batches) have no mean: the largest is kept.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tensors: Mapping[str, Tensor], share: float) -> None:
        """Add one part; the shares of all parts add up to one."""
        for name, tensor in tensors.items():
            self._dtypes[name] = tensor.dtype
            if name in self._sums and self._sums[name].shape != tensor.shape:
                shapes = f"{tuple(self._sums[name].shape)} and {tuple(tensor.shape)}"
                raise InvalidInput(
                    f"{name!r} has the shapes {shapes} at two clients, which have no mean: keep it of one shape, or "
                    "train by a schedule that hands segments on (sequential)"
                )
            if not tensor.is_floating_point():
                kept = self._sums.get(name)
                self._sums[name] = tensor.clone() if kept is None else torch.maximum(kept, tensor)
            elif name in self._sums:
                self._sums[name].add_(tensor, alpha=share)
            else:
                self._sums[name] = tensor.to(torch.float64, copy=True).mul_(share)

    def value(self) -> dict[str, Tensor]:
        """Return the mean, each tensor in its own type."""
        return {name: total.to(self._dtypes[name]) for name, total in self._sums.items()}


def shares(weights: Mapping[int, float]) -> dict[int, float]:
    """Return `weights` scaled to add up to one."""
    total = sum(weights.values())
    return {replica: weight / total for replica, weight in weights.items()}
