"""Resizing of images in decoders: the number of doublings and the convolution between two sizes, without loss."""

from __future__ import annotations

from torch import nn

WIDEST = 8
"""Largest difference of two sizes at which a kernel as wide as the difference is cheap."""


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
