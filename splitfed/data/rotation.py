"""Images rotated by several angles, each of which is a domain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from splitfed.core.errors import InvalidInput, check_number

ANGLES = (0.0, 20.0, 40.0, 60.0)
AT_ONCE = 1024
"""Number of images rotated at a time."""


def rotated(name: str, x: Tensor, angles: Sequence[float], value_range: tuple[float, float] | None = None) -> Tensor:
    """Return the images of x (n, channels, height, width) once for each of `angles`: (angles * n, ...).

    Angles are in degrees, clockwise; at 0 an image is unchanged. Pixels are interpolated bilinearly, and pixels from
    outside of the image get the smallest allowed value (0 without a value range). Raises `InvalidInput` for rows that
    are no images and for two angles of the same rotation.
    """
    if not x.is_floating_point():
        raise InvalidInput(
            f"{name} has rows of whole numbers, which cannot be interpolated; only images can be rotated"
        )
    if x.dim() != 4:
        raise InvalidInput(
            f"{name} has rows of shape {tuple(x.shape[1:])}; only images (channels, height, width) can be rotated"
        )
    if isinstance(angles, (int, float)) or len(angles) == 0:
        raise InvalidInput(f"angles={angles!r} is not allowed; expected one or more angles in degrees")
    for angle in angles:
        check_number("angle", angle)
    turns = [float(angle) % 360 for angle in angles]
    if len(set(turns)) < len(turns):
        raise InvalidInput(f"angles={list(angles)} has the same rotation twice; expected different domains")
    low, high = value_range or (0.0, None)
    rotations = [x if turn == 0 else _turn(x - low, turn) + low for turn in turns]
    # Interpolated values may leave the range by a rounding error.
    return torch.cat(rotations) if high is None else torch.cat(rotations).clamp_(low, high)


def _turn(x: Tensor, angle: float) -> Tensor:
    """Return x (n, c, h, w) rotated clockwise by `angle` degrees about its centre, with zeros from outside."""
    height, width = x.shape[2:]
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    # Source position of each pixel: the inverse rotation, in coordinates where both sides reach from -1 to 1 and y
    # points down.
    matrix = torch.tensor([[[c, s * height / width, 0.0], [-s * width / height, c, 0.0]]], dtype=x.dtype)
    grid = affine_grid(matrix, [1, *x.shape[1:]], align_corners=False)
    turn = partial(grid_sample, mode="bilinear", padding_mode="zeros", align_corners=False)
    return torch.cat([turn(few, grid.expand(len(few), -1, -1, -1)) for few in x.split(AT_ONCE)])
