"""Image folder: one sub-folder of pictures for each class, classes in the order of their names."""

from __future__ import annotations

from pathlib import Path

from splitfed.data.dataset import Dataset
from splitfed.data.sources.files import existing_folder
from splitfed.data.sources.images import PIXELS, Pictures, folders


def image_folder(
    path: str | Path, size: int | tuple[int, int] | None = None, grayscale: bool = False, pixels: int = PIXELS
) -> Dataset:
    """Return the pictures of all sub-folders of `path`, x (n, 3 or 1, height, width) in [0, 1].

    `size` (one side, or height and width) resizes each, bilinearly and without keeping its proportions; without it all
    pictures must have the same size. Files with other suffixes are ignored. `pixels`: the largest number of pixels of a
    picture, by its header. Raises `InvalidInput` that names the first file that cannot be read.
    """
    root = existing_folder(path)
    pictures = Pictures(size, grayscale, pixels)
    names = folders(root, "class")
    for label, name in enumerate(names):
        pictures.add(root / name, label)
    return pictures.dataset(root, len(names))
