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
    kernels, paddings = [], []
    for size, wanted in zip(side, goal, strict=True):
        gap = wanted - size
        more = 1 if abs(gap) < 2 else 0
        kernels.append(abs(gap) + 1 + 2 * more)
        paddings.append(max(-gap, 0) + more)
    return nn.ConvTranspose2d(source, target, (kernels[0], kernels[1]), padding=(paddings[0], paddings[1]))
