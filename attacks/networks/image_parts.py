"""Parts of an image: which upright rectangles of it a released value shows, by what it was computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, prod
from typing import NamedTuple

import torch
from torch import Tensor


class Rectangle(NamedTuple):
    """An upright rectangle of an image (channels, height, width), all channels of it; in pixels from the upper left."""

    top: int
    left: int
    height: int
    width: int

    def cut(self, x: Tensor) -> Tensor:
        """Return this part of images (..., height, width), sharing their memory."""
        return x[..., self.top : self.top + self.height, self.left : self.left + self.width]

    def margins(self, height: int, width: int) -> list[int]:
        """Return what is left, right, above and below of the box in an image of that size, in pixels."""
        return [self.left, width - self.left - self.width, self.top, height - self.top - self.height]


def box(shape: tuple[int, ...], positions: Tensor) -> Rectangle | None:
    """Return the rectangle of all channels that `positions` (k,) of the flattened image are; None if they are none."""
    inside = torch.zeros(prod(shape), dtype=torch.bool)
    inside[positions] = True
    found = inside.view(shape).nonzero()
    low, high = found.min(0).values.tolist(), (found.max(0).values + 1).tolist()
    size = [last - first for first, last in zip(low, high, strict=True)]
    if prod(size) != len(found) or size[0] != shape[0]:
        return None
    return Rectangle(low[1], low[2], size[1], size[2])


def boxes(
    shape: tuple[int, ...],
    places: Mapping[str, Tensor],
    origins: Mapping[str, Sequence[str]],
    releases: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[Rectangle, ...]]:
    """Return for every value in `releases` (value -> shape of one release) the parts of an image that it shows.

    `places`: input -> (k,) positions in a flattened image; `origins`: value -> the inputs that it was computed from.
    Of several parts that went in, a value whose grid has the proportions of one shows each (joined as channels), one
    whose grid has those of the image shows the whole. So does a flat value of several inputs, one of an input that is
    no rectangle, and one of which nothing is known.
    """
    whole = Rectangle(0, 0, shape[1], shape[2])
    rectangles = {}
    for name, released in releases.items():
        mine = [box(shape, places[i]) for i in origins.get(name, ()) if i in places]
        known = list(dict.fromkeys(b for b in mine if b is not None))
        alone = len(known) == 1 or (len(released) == 3 and bool(known) and _part_fits_better(released, known[0], whole))
        rectangles[name] = tuple(known) if known and len(known) == len(mine) and alone else (whole,)
    return rectangles


def _part_fits_better(released: tuple[int, ...], part: Rectangle, whole: Rectangle) -> bool:
    grid = log(released[1] / released[2])
    return abs(grid - log(part.height / part.width)) < abs(grid - log(whole.height / whole.width))
