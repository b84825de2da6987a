"""NPY: rows and labels in two .npy files; rows are read by batch through a memory map and may exceed the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from splitfed.core.errors import InvalidInput
from splitfed.data import arrays
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import ArrayRows, RowType, TaskLike, labelled
from splitfed.data.sources.files import existing_file


def npy(
    x: str | Path,
    y: str | Path,
    domains: str | Path | None = None,
    task: TaskLike = None,
    channels_last: bool = False,
    dtype: RowType = "float32",
) -> Dataset:
    """Return the rows in the file `x`, with the labels in `y` and, if given, the domains in `domains`.

    Rows are read and checked when they are used; labels and domains are kept in memory. Task, labels and `dtype` as in
    `from_arrays`. Bytes (uint8) of three or more dimensions are images: divided by 255, with value range [0, 1], and
    with a channel added if they have none; with dtype "int64" they are ordinary numbers. `channels_last`: x is (n,
    height, width, channels) in the file. Raises `InvalidInput` for a malformed file, and for unequal numbers of rows.
    """
    source = existing_file(x)
    found = _open(source, arrays.map_array)
    pixels = dtype == "float32" and found.dtype == np.uint8 and found.ndim >= 3
    if channels_last and found.ndim != 4:
        raise InvalidInput(f"channels_last=True needs 4 dimensions; {source} has shape {found.shape}")
    rows = ArrayRows(str(source), found, dtype, pixels=pixels, channels_last=channels_last)
    places = None if domains is None else _open(existing_file(domains), _read)
    labels = _open(existing_file(y), _read)
    return labelled(source.stem, rows, labels, task, (0.0, 1.0) if pixels else None, places)


def _read(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return arrays.read_array(file, path.stat().st_size)


def _open(path: Path, read: Callable[[Path], np.ndarray]) -> np.ndarray:
    try:
        return read(path)
    except arrays.MALFORMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(f"{path} is no .npy file that can be read: {reason}") from None
