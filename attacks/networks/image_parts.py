"""Parts and sizes of images in decoders: the rectangles that a released value shows, and resizing without loss.

A rectangle is derived from the inputs that the value is computed from. Between two sizes an image is doubled as often
as needed, and a convolution bridges the remaining difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

WIDEST = 8
"""Largest difference of two sizes at which a kernel as wide as the difference is cheap."""


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


def doublings(size: int, goal: int) -> tuple[int, int]:
    """Return how often `size` (at least 2) is doubled to reach `goal`, and the size to resize it to before.

    That size is at least `size`, as convolutions without padding cut margins off, unless that would be far above
    `goal`; doubled it equals or slightly exceeds `goal`.
    """
    times = 0
    while -(-goal // 2 ** (times + 1)) >= size:
        times += 1
    reached = -(-goal // 2**times)
    if reached - size > WIDEST and 4 * size < 3 * reached:
        times += 1
    return times, -(-goal // 2**times)


def bridge(source: int, target: int, side: tuple[int, int], goal: tuple[int, int]) -> nn.ConvTranspose2d:
    """Return a convolution from `source` to `target` channels and from images of `side` to images of `goal`.

    Its kernel is one wider than the difference of sizes, so that every input reaches an output and every output pixel
    at the margin has an input; it is 3 or 4 wide for a difference of 0 or 1 pixel.
    """
    gaps = [wanted - size for size, wanted in zip(side, goal, strict=True)]
    high, wide = (abs(gap) + (3 if abs(gap) < 2 else 1) for gap in gaps)
    top, left = (max(-gap, 0) + (1 if abs(gap) < 2 else 0) for gap in gaps)
    return nn.ConvTranspose2d(source, target, (high, wide), padding=(top, left))
