"""NPZ: named arrays in a .npz file, never unpickled."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from splitfed.core.errors import InvalidInput, check_names
from splitfed.data import arrays
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import RowType, TaskLike, from_arrays
from splitfed.data.sources.files import existing_file


def npz(
    path: str | Path,
    x: str | Sequence[str] = "x",
    y: str = "y",
    domains: str | None = None,
    task: TaskLike = None,
    channels_last: bool = False,
    dtype: RowType = "float32",
) -> Dataset:
    """Return the arrays called `x`, `y` and `domains` in the file; task, labels and `dtype` as in `from_arrays`.

    Several names in `x` give the parts of a row, such as ["input_ids", "attention_mask"]: features of these names.
    Bytes (uint8) of three or more dimensions are images: divided by 255, with value range [0, 1], and with a channel
    added if they have none; as parts, or with dtype "int64", they are ordinary numbers. `channels_last`: x is (n,
    height, width, channels) in the file.
    """
    source = existing_file(path)
    names = [x] if isinstance(x, str) else list(x)
    if not names or len(set(names)) < len(names):
        raise InvalidInput(f"x={names} is not allowed; expected the name of an array, or several, each once")
    found = _read(source, [*names, y, *([] if domains is None else [domains])])
    parts = {name: found[name] for name in names}
    image = isinstance(x, str) and dtype == "float32" and parts[x].dtype == np.uint8 and parts[x].ndim >= 3
    for name, values in parts.items() if channels_last else ():
        if values.ndim != 4:
            raise InvalidInput(f"channels_last=True needs 4 dimensions; {name!r} in {source} has shape {values.shape}")
        parts[name] = values.transpose(0, 3, 1, 2)
    inputs = parts[x] if isinstance(x, str) else parts
    if image:
        assert isinstance(inputs, np.ndarray)
        inputs = (inputs[:, None] if inputs.ndim == 3 else inputs).astype(np.float32) / 255
    return from_arrays(
        inputs,
        found[y],
        task=task,
        name=source.stem,
        value_range=(0.0, 1.0) if image else None,
        domains=None if domains is None else found[domains],
        dtype=dtype,
    )


def _read(source: Path, names: list[str]) -> dict[str, np.ndarray]:
    try:
        available = arrays.array_names(source)
        for name in names:
            check_names(f"array in {source}:", available, name)
        return {name: arrays.read_member(source, name) for name in names}
    except InvalidInput:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise InvalidInput(f"{source} is no whole .npz file: {error}") from None
    except arrays.MALFORMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(f"{source} holds an array that cannot be read: {reason}") from None
