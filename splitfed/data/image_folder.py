"""Image folder: one sub-folder of pictures a class, classes in the order of their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from splitfed.data.dataset import Dataset
from splitfed.data.files import existing_folder
from splitfed.data.from_python import from_arrays
from splitfed.errors import InvalidInput, check_count
from splitfed.task import classification

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def image_folder(path: str | Path, size: int | tuple[int, int] | None = None, grayscale: bool = False) -> Dataset:
    """Return the pictures of all sub-folders of `path`, x (n, 3 or 1, height, width) in [0, 1].

    `size` (one side, or height and width) resizes each, bilinearly and without keeping its proportions;
    without it all pictures must agree. Files with other suffixes are passed over. Raises `InvalidInput` that
    names the first file that cannot be read.
    """
    root = existing_folder(path)
    wanted = _size(size)
    names = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if len(names) < 2:
        raise InvalidInput(f"{root} has {len(names)} sub-folders; expected one a class, at least two")
    images: list[np.ndarray] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        files = sorted(file for file in (root / name).iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise InvalidInput(f"{root / name} has no pictures; expected files such as .png or .jpg")
        for file in files:
            image = _read(file, wanted, "L" if grayscale else "RGB")
            if images and image.shape != images[0].shape:
                raise InvalidInput(
                    f"{file} is {image.shape[1]}x{image.shape[2]}, the first picture "
                    f"{images[0].shape[1]}x{images[0].shape[2]}; give a size to resize all"
                )
            images.append(image)
        labels += [label] * len(files)
    x = np.stack(images).astype(np.float32) / 255
    return from_arrays(
        x,
        np.asarray(labels),
        task=classification(len(names)),
        name=root.resolve().name,
        value_range=(0.0, 1.0),
    )


def _size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2:
        raise InvalidInput(f"size={size!r} is not allowed; expected one side, or height and width")
    height, width = sides
    check_count("size", height, low=1)
    check_count("size", width, low=1)
    return height, width


def _read(file: Path, size: tuple[int, int] | None, mode: str) -> np.ndarray:
    """Return one picture as bytes (channels, height, width)."""
    # Pillow is slow to import and needed by this loader alone.
    from PIL import Image

    try:
        with Image.open(file) as picture:
            if picture.mode in ("F", "I") or picture.mode.startswith("I;"):
                raise InvalidInput(f"{file} has pixels of type {picture.mode}; expected 8 bits a channel")
            converted = picture.convert(mode)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"{file} cannot be read as a picture: {str(error).splitlines()[0]}") from None
    if size is not None:
        converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(converted)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
