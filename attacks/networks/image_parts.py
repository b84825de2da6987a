"""Parts of an image: the rectangles that a released value shows, derived from the inputs it is computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, prod
from typing import NamedTuple

import torch
from torch import Tensor


class Rectangle(NamedTuple):
    """An axis-aligned rectangle of an image (channels, height, width), in pixels from the upper left.

    It has all channels.
    """

    top: int
    left: int
    height: int
    width: int

    def cut(self, x: Tensor) -> Tensor:
        """Return this part of images (..., height, width), as a view of their memory."""
        return x[..., self.top : self.top + self.height, self.left : self.left + self.width]

    def margins(self, height: int, width: int) -> list[int]:
        """Return the margins left, right, above and below the rectangle in an image of that size, in pixels."""
        return [self.left, width - self.left - self.width, self.top, height - self.top - self.height]


def box(shape: tuple[int, ...], positions: Tensor) -> Rectangle | None:
    """Return the rectangle, with all channels, that `positions` (k,) of the flattened image form.

    None if they form none.
    """
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

    `places`: input -> (k,) positions in a flattened image; `origins`: value -> the inputs that it is computed from. A
    value computed from several parts shows each of them (joined as channels) if its grid has the proportions of one
    part, and the whole image if its grid has the image's proportions. A flat value of several inputs, a value of an
    input that is no rectangle, and a value of unknown origin show the whole image too.
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
