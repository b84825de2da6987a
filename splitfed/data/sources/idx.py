"""IDX: a folder of IDX files, gzipped or not, as MNIST, Fashion-MNIST and similar sets are published.

Format: http://yann.lecun.com/exdb/mnist/ (two zero bytes, a type, the number of dimensions, each dimension as four
bytes, then the values, all of it big-endian).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from splitfed.core.errors import InvalidInput, check_names
from splitfed.data import arrays
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays
from splitfed.data.sources.files import existing_file, existing_folder

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MOST = 8
"""Dimensions that an array may have; published files have one to four."""

PREFIXES = {"train": ("train",), "test": ("t10k",), "all": ("train", "t10k")}


def idx(folder: str | Path, split: str = "train") -> Dataset:
    """Return the images of `folder`, x (n, 1, height, width) in [0, 1], with largest label + 1 classes.

    Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz; `split` is "train", "test" or "all" (both).
    Debian's package dataset-fashion-mnist puts them in /usr/share/datasets/fashion-mnist. Raises `InvalidInput` that
    names the file if one is missing, truncated or malformed.
    """
    check_names("split", PREFIXES, split)
    root = existing_folder(folder)
    pairs = [_pair(root, prefix) for prefix in PREFIXES[split]]
    images = np.concatenate([pair[0] for pair in pairs])
    labels = np.concatenate([pair[1] for pair in pairs])
    x = images[:, None].astype(np.float32) / 255
    return from_arrays(x, labels, name=root.resolve().name, value_range=(0.0, 1.0))


def read_idx(path: str | Path) -> np.ndarray:
    """Return the array in one IDX file, gunzipped when its name ends in .gz, in the machine's byte order."""
    source = existing_file(path)
    packed = source.stat().st_size
    try:
        with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as file:
            return _array(source, cast(IO[bytes], file), packed)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidInput(f"{source} is no whole gzip file: {error}") from None


def _array(source: Path, file: IO[bytes], packed: int) -> np.ndarray:
    """Return the array in `file`, which has `packed` bytes on disk; its size is checked before it is read."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES:
        raise InvalidInput(f"{source} begins with 0x{magic.hex()}; expected an IDX magic number, 0x0000tt0d")
    kind, dimensions = np.dtype(TYPES[magic[2]]), magic[3]
    if not 1 <= dimensions <= MOST:
        raise InvalidInput(f"{source} claims {dimensions} dimensions; expected 1 to {MOST}")
    header = file.read(4 * dimensions)
    start = 4 + 4 * dimensions
    if len(header) < 4 * dimensions:
        raise InvalidInput(f"{source} is {4 + len(header)} bytes; its header alone takes {start}")
    shape = struct.unpack(f">{dimensions}I", header)
    size = math.prod(shape) * kind.itemsize
    if source.suffix == ".gz":
        try:
            arrays.check_unpacked(start + size, packed)
        except ValueError as error:
            raise InvalidInput(f"{source} has a header with shape {shape}: {error}") from None
    elif packed != start + size:
        raise InvalidInput(f"{source} is {packed} bytes; expected {start + size} for shape {shape}")
    raw = file.read(size)
    if len(raw) != size or file.read(1):
        there = f"{start + len(raw)}" if len(raw) < size else "more"
        raise InvalidInput(f"{source} is {there} bytes; expected {start + size} for shape {shape}")
    if not size:
        raise InvalidInput(f"{source} has shape {shape}; expected at least one number")
    return np.frombuffer(raw, kind).reshape(shape).astype(kind.newbyteorder("="))


def _pair(root: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    image_file = _find(root, f"{prefix}-images-idx3-ubyte")
    label_file = _find(root, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(image_file), read_idx(label_file)
    for path, array, dimensions in ((image_file, images, 3), (label_file, labels, 1)):
        if array.ndim != dimensions or array.dtype != np.uint8:
            raise InvalidInput(f"{path} has shape {array.shape} of {array.dtype}; expected {dimensions}-d bytes")
    if len(images) != len(labels):
        raise InvalidInput(f"{image_file} has {len(images)} images and {label_file.name} {len(labels)} labels")
    return images, labels


def _find(root: Path, name: str) -> Path:
    for candidate in (root / name, root / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise InvalidInput(f"{root} has neither {name} nor {name}.gz")
