"""Pictures read from folders: one sub-folder a class, files in the order of their names."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from splitfed.core.errors import InvalidInput, check_count, first_line
from splitfed.core.tasks import classification
from splitfed.data import arrays
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays
from splitfed.data.sources.files import existing_file

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Allowed formats: Pillow ignores the suffix, and would start Ghostscript for a file in EPS."""
PIXELS = 2**25
"""Default of `pixels`; the header of a picture is checked before it is decoded."""


def folders(root: Path, what: str) -> list[str]:
    """Return the names of the sub-folders of `root`, one a `what`, sorted; raise `InvalidInput` for fewer than two."""
    names = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if len(names) < 2:
        raise InvalidInput(f"{root} has {len(names)} sub-folders; expected one a {what}, at least two")
    return names


class Pictures:
    """Collects pictures of one shape: `images` are bytes (channels, height, width), `labels` their classes."""

    def __init__(self, size: int | tuple[int, int] | None, grayscale: bool, pixels: int) -> None:
        """Create an empty collection; arguments as in `image_folder`. Raises `InvalidInput` for a bad `size`."""
        check_count("pixels", pixels, low=1)
        self._pixels = pixels
        self.images: list[np.ndarray] = []
        self.labels: list[int] = []
        self._size = _check_size(size)
        self._mode = "L" if grayscale else "RGB"

    def add(self, folder: Path, label: int) -> int:
        """Read the pictures in `folder` as class `label`; return their number, at least one."""
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise InvalidInput(f"{folder} has no pictures; expected files such as .png or .jpg")
        for file in files:
            image = _read(existing_file(file), self._size, self._mode, self._pixels)
            if self.images and image.shape != self.images[0].shape:
                raise InvalidInput(
                    f"{file} is {image.shape[1]}x{image.shape[2]}, the first picture "
                    f"{self.images[0].shape[1]}x{self.images[0].shape[2]}; give a size to resize all"
                )
            self.images.append(image)
        self.labels += [label] * len(files)
        return len(files)

    def dataset(self, root: Path, classes: int, domains: Sequence[int] | None = None) -> Dataset:
        """Return all pictures, x (n, channels, height, width) float32 in [0, 1], as a data set called like `root`."""
        return from_arrays(
            np.stack(self.images).astype(np.float32) / 255,
            np.asarray(self.labels),
            task=classification(classes),
            name=root.resolve().name,
            value_range=(0.0, 1.0),
            domains=None if domains is None else np.asarray(domains),
        )


def _check_size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2:
        raise InvalidInput(f"size={size!r} is not allowed; expected one side, or height and width")
    height, width = sides
    check_count("size", height, low=1)
    check_count("size", width, low=1)
    return height, width


def _read(file: Path, size: tuple[int, int] | None, mode: str, pixels: int) -> np.ndarray:
    """Return one picture of at most `pixels` as bytes (channels, height, width)."""
    # Pillow is slow to import and needed by this loader alone.
    from PIL import Image

    # Pillow's own limit is global, and may be below `pixels`.
    bound, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(file, formats=FORMATS) as picture:
            if picture.width * picture.height > pixels:
                raise InvalidInput(
                    f"{file} has {picture.width * picture.height} pixels; expected at most {pixels} (argument pixels)"
                )
            if picture.mode in ("F", "I") or picture.mode.startswith("I;"):
                raise InvalidInput(f"{file} has pixels of type {picture.mode}; expected 8 bits a channel")
            converted = picture.convert(mode)
    except InvalidInput:
        raise
    except (OSError, IndexError, struct.error, *arrays.MALFORMED) as error:
        raise InvalidInput(f"{file} cannot be read as a picture: {first_line(error)}") from None
    finally:
        Image.MAX_IMAGE_PIXELS = bound
    if size is not None:
        converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    image = np.asarray(converted)
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
