"""The features of a row that the adversary does not hold: the part that a reconstruction is scored on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from splitfed.attacks.networks.image_parts import box


@dataclass(frozen=True)
class UnknownFeatures:
    """Selects the numbers at `positions` (k,), in order, of flattened rows of `shape`.

    A rectangle of an image stays an image; anything else is a vector (k,).
    """

    shape: tuple[int, ...]
    positions: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return this part of every row of x (n, *shape): (n, k), or (n, channels, height, width)."""
        part = x.flatten(1)[:, self.positions.to(x.device)]
        rectangle = box(self.shape, self.positions) if len(self.shape) == 3 else None
        return part if rectangle is None else part.reshape(len(x), -1, rectangle.height, rectangle.width)


def select_unknown(
    shape: tuple[int, ...], places: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> UnknownFeatures | None:
    """Return the selection of all numbers of a row of `shape` that no input in `own` holds.

    None if it is the whole row.

    `places`: input -> (k,) the positions in a flattened row that it reads.
    """
    held = torch.zeros(prod(shape), dtype=torch.bool)
    for name in own:
        held[places[name]] = True
    return UnknownFeatures(shape, (~held).nonzero().flatten()) if bool(held.any()) else None
