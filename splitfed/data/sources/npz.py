"""NPZ: named arrays in a .npz file, never unpickled."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from splitfed.core.errors import InvalidInput, unknown
from splitfed.data import arrays
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import TaskLike, from_arrays
from splitfed.data.sources.files import existing_file


def npz(
    path: str | Path,
    x: str = "x",
    y: str = "y",
    domains: str | None = None,
    task: TaskLike = None,
    channels_last: bool = False,
) -> Dataset:
    """Return the arrays called `x`, `y` and `domains` in the file; task and labels as in `from_arrays`.

    Bytes (uint8) of three or more dimensions are images: divided by 255, with value range [0, 1], and given a
    channel when they have none. `channels_last` says that x is (n, height, width, channels) in the file.
    """
    source = existing_file(path)
    names = [x, y] if domains is None else [x, y, domains]
    arrays_read = _read(source, names)
    inputs = arrays_read[x]
    image = inputs.dtype == np.uint8 and inputs.ndim >= 3
    if channels_last:
        if inputs.ndim != 4:
            raise InvalidInput(f"channels_last=True needs 4 dimensions; {x!r} in {source} has shape {inputs.shape}")
        inputs = inputs.transpose(0, 3, 1, 2)
    if image:
        inputs = (inputs[:, None] if inputs.ndim == 3 else inputs).astype(np.float32) / 255
    return from_arrays(
        inputs,
        arrays_read[y],
        task=task,
        name=source.stem,
        value_range=(0.0, 1.0) if image else None,
        domains=None if domains is None else arrays_read[domains],
    )


def _read(source: Path, names: list[str]) -> dict[str, np.ndarray]:
    try:
        available = arrays.array_names(source)
        for name in names:
            if name not in available:
                raise unknown(f"array in {source}:", name, available)
        return {name: arrays.read_member(source, name) for name in names}
    except InvalidInput:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise InvalidInput(f"{source} is no whole .npz file: {error}") from None
    except arrays.MALFORMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(f"{source} holds an array that cannot be read: {reason}") from None
