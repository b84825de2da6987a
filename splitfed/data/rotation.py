"""Images turned by several angles: each angle is a domain of its own."""

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
"""How many images are turned at a time."""


def rotated(name: str, x: Tensor, angles: Sequence[float], value_range: tuple[float, float] | None = None) -> Tensor:
    """Return the images of x (n, channels, height, width) once for each of `angles`: (angles * n, ...).

    Angles are in degrees, clockwise; at 0 an image is as it was. Pixels are interpolated bilinearly, what comes from
    outside the image is the least value there may be (0 where there is no such bound). Refuses rows that are no images
    and angles that are the same turn twice.
    """
    if not x.is_floating_point():
        raise InvalidInput(f"{name} has rows of whole numbers, which cannot be interpolated; only images turn")
    if x.dim() != 4:
        raise InvalidInput(f"{name} has rows of shape {tuple(x.shape[1:])}; only images (channels, height, width) turn")
    if isinstance(angles, (int, float)) or len(angles) == 0:
        raise InvalidInput(f"angles={angles!r} is not allowed; expected one or more angles in degrees")
    for angle in angles:
        check_number("angle", angle)
    turns = [float(angle) % 360 for angle in angles]
    if len(set(turns)) < len(turns):
        raise InvalidInput(f"angles={list(angles)} has one turn twice; expected domains that differ")
    low, high = value_range or (0.0, None)
    rotations = [x if turn == 0 else _turn(x - low, turn) + low for turn in turns]
    # What is interpolated may leave the range by a rounding.
    return torch.cat(rotations) if high is None else torch.cat(rotations).clamp_(low, high)


def _turn(x: Tensor, angle: float) -> Tensor:
    """Return x (n, c, h, w) turned clockwise by `angle` degrees about the middle; zeros come in from outside."""
    height, width = x.shape[2:]
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    # From where each pixel comes: the turn the other way, in coordinates where both sides reach from -1 to 1 and y
    # points down.
    matrix = torch.tensor([[[c, s * height / width, 0.0], [-s * width / height, c, 0.0]]], dtype=x.dtype)
    grid = affine_grid(matrix, [1, *x.shape[1:]], align_corners=False)
    turn = partial(grid_sample, mode="bilinear", padding_mode="zeros", align_corners=False)
    return torch.cat([turn(few, grid.expand(len(few), -1, -1, -1)) for few in x.split(AT_ONCE)])
