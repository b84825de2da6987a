"""Checks of the input shapes of models, which are refused in one line."""

from __future__ import annotations

from collections.abc import Sequence

from splitfed.core.errors import InvalidInput, check_count


def image_shape(model: str, shape: Sequence[int], outputs: int, smallest: int = 1) -> tuple[int, int, int]:
    """Return (channels, height, width); raise `InvalidInput` unless `shape` is one of at least that size."""
    check_count("outputs", outputs, low=1)
    if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < smallest:
        raise InvalidInput(
            f"{model} cannot take rows of shape {tuple(shape)}; expected (channels, height, width), height "
            f"and width of at least {smallest}"
        )
    channels, height, width = shape
    return channels, height, width


def signal_shape(model: str, shape: Sequence[int], outputs: int, smallest: int = 1) -> tuple[int, int]:
    """Return (channels, length), one channel if `shape` is (length,); raise `InvalidInput` for other shapes."""
    check_count("outputs", outputs, low=1)
    if len(shape) not in (1, 2) or min(shape) < 1 or shape[-1] < smallest:
        raise InvalidInput(
            f"{model} cannot take rows of shape {tuple(shape)}; expected (channels, length) or (length,), length of at "
            f"least {smallest}"
        )
    return (shape[0] if len(shape) == 2 else 1), shape[-1]
