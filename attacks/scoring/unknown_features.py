"""What of a row the adversary does not hold itself: the only part that its reconstruction is scored on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnknownFeatures:
    """The part of rows of `shape` that stands at `positions` (k,), in order, of the flattened row.

    An upright rectangle of an image stays an image; anything else is a vector (k,).
    """

    shape: tuple[int, ...]
    positions: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return this part of every row of x (n, *shape): (n, k), or (n, channels, height, width)."""
        part = x.flatten(1)[:, self.positions.to(x.device)]
        box = self._box()
        return part if box is None else part.reshape(len(x), *box)

    def _box(self) -> tuple[int, ...] | None:
        if len(self.shape) != 3:
            return None
        inside = torch.zeros(prod(self.shape), dtype=torch.bool)
        inside[self.positions] = True
        found = inside.view(self.shape).nonzero()
        low, high = found.min(0).values, found.max(0).values + 1
        size = tuple(int(s) for s in high - low)
        return size if prod(size) == len(self.positions) and size[0] == self.shape[0] else None


def select_unknown(
    shape: tuple[int, ...], places: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> UnknownFeatures | None:
    """Return what of a row of `shape` no input in `own` holds; None where that is everything.

    `places`: input -> (k,) the positions in a flattened row that it reads.
    """
    held = torch.zeros(prod(shape), dtype=torch.bool)
    for name in own:
        held[places[name]] = True
    return UnknownFeatures(shape, (~held).nonzero().flatten()) if bool(held.any()) else None
