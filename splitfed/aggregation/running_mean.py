"""The weighted mean of several parties' tensors, added up one party at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


class RunningMean:
    """Sum of `share * tensor` in double precision; a single upload of share 1 is returned bit for bit.

    Integer tensors (a batch norm's count of batches) are not averaged: the largest value is kept.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tensors: Mapping[str, Tensor], share: float) -> None:
        """Add one party's tensors; the shares of all parties add up to one."""
        for name, tensor in tensors.items():
            self._dtypes[name] = tensor.dtype
            if name in self._sums and self._sums[name].shape != tensor.shape:
                shapes = f"{tuple(self._sums[name].shape)} and {tuple(tensor.shape)}"
                raise InvalidInput(
                    f"{name!r} has the shapes {shapes} at two clients and cannot be averaged: give it one shape, or "
                    "take a schedule that hands segments on (sequential)"
                )
            if not tensor.is_floating_point():
                kept = self._sums.get(name)
                self._sums[name] = tensor.clone() if kept is None else torch.maximum(kept, tensor)
            elif name in self._sums:
                self._sums[name].add_(tensor, alpha=share)
            else:
                self._sums[name] = tensor.to(torch.float64, copy=True).mul_(share)

    def value(self) -> dict[str, Tensor]:
        """Return the mean, each tensor in the data type in which it was added."""
        return {name: total.to(self._dtypes[name]) for name, total in self._sums.items()}


def shares(weights: Mapping[int, float]) -> dict[int, float]:
    """Return `weights` scaled to add up to one."""
    total = sum(weights.values())
    return {replica: weight / total for replica, weight in weights.items()}
