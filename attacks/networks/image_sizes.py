"""Sizes of images: by how many doublings and which convolution one size becomes another, with nothing thrown away."""

from __future__ import annotations

from torch import nn

WIDEST = 8
"""A gap between two sizes up to which a kernel as wide as the gap is cheap."""


def doublings(size: int, goal: int) -> tuple[int, int]:
    """Return how often `size` (at least 2) is doubled to reach `goal`, and the size to bring it to before.

    That size is not below `size`, as convolutions without padding cut margins off, unless it would be far above;
    doubled it reaches `goal` or a little more.
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

    Its kernel is one wider than the gap, so that every number at the source reaches, and every pixel of the margin is
    reached by, the nearest of the other side; it is 3 or 4 wide where there is no gap or one of a single pixel.
    """
    gaps = [wanted - size for size, wanted in zip(side, goal, strict=True)]
    high, wide = (abs(gap) + (3 if abs(gap) < 2 else 1) for gap in gaps)
    top, left = (max(-gap, 0) + (1 if abs(gap) < 2 else 0) for gap in gaps)
    return nn.ConvTranspose2d(source, target, (high, wide), padding=(top, left))
