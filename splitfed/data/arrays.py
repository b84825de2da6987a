"""Reading of .npy and .npz files from untrusted sources: claimed sizes are checked before anything is read.

A header may claim a shape of terabytes, and a small compressed file may unpack to as much. Nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

DEFLATE = 1032
"""Largest compression ratio that deflate can reach; a higher claim is false."""

LARGE, RATIO = 2**28, 100
"""Bytes and compression ratio from which on a compressed array is refused as a decompression bomb."""

MALFORMED = (
    *(ValueError, EOFError, KeyError, SyntaxError, TypeError, OverflowError, NotImplementedError, RuntimeError),
    *(RecursionError, MemoryError, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""Exceptions that reading a malformed or truncated file may raise."""


def memory() -> int:
    """Return the bytes of memory of this machine; 64 GiB where the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**36


def check_size(size: int) -> None:
    """Raise ValueError for `size` bytes if the machine has less memory."""
    if size > memory():
        raise ValueError(f"it claims {size} bytes; this machine has {memory()} bytes of memory")


def check_unpacked(size: int, packed: int) -> None:
    """Raise ValueError for `size` bytes claimed to unpack from `packed` compressed ones, if that is implausible."""
    if size > DEFLATE * packed + 1024:
        raise ValueError(f"it claims {size} bytes; {packed} compressed ones unpack to {DEFLATE} times as many at most")
    check_size(size)
    if size > LARGE and size > RATIO * packed:
        raise ValueError(
            f"it unpacks to {size} bytes, {size // packed} times its size, which real data does not; save it without "
            "compression if that is intended"
        )


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in a .npz file."""
    with zipfile.ZipFile(path) as archive:
        return [entry.removesuffix(".npy") for entry in archive.namelist()]


def read_member(path: Path, name: str) -> np.ndarray:
    """Return the array `name` of a .npz file; raise one of `MALFORMED` for a bad file."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.NameToInfo else name)
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name!r} is not compressed as numpy does it; write the file with numpy.savez")
        packed = min(entry.compress_size, path.stat().st_size)
        if entry.compress_type == zipfile.ZIP_STORED and entry.file_size > packed:
            raise ValueError(f"{name!r} claims {entry.file_size} bytes; there are {packed}")
        check_unpacked(entry.file_size, max(packed, 1))
        with archive.open(entry) as file:
            return read_array(file, entry.file_size)


def map_array(path: Path) -> np.memmap:
    """Return the array in a .npy file as a read-only memory map, without reading it; raise one of `MALFORMED`."""
    with path.open("rb") as file:
        shape, fortran, dtype = read_header(file, path.stat().st_size)
        offset = file.tell()
    if 0 in shape:
        raise ValueError(f"it is empty, of shape {shape}")
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")


def read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether in Fortran order, and type of the array in a .npy file of `size` bytes.

    The file is read up to the array's data. Raises one of `MALFORMED`, also for a claim of more than the file holds.
    """
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"it is of version {version[0]}.{version[1]}; expected 1.0 or 2.0")
    try:
        shape, fortran, dtype = readers[version](file)
    except MALFORMED:
        # numpy's own message would contain the whole header, or an address.
        raise ValueError("its header does not say shape, order and type of an array") from None
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded, as their objects would have to be unpickled")
    if min(shape, default=0) < 0:
        raise ValueError(f"it claims shape {shape}")
    claimed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if claimed > there:
        raise ValueError(f"it claims shape {shape} of {dtype}, which takes {claimed} bytes; it holds {there}")
    return shape, fortran, dtype


def read_array(file: IO[bytes], size: int) -> np.ndarray:
    """Return the array in a .npy file of `size` bytes; raise one of `MALFORMED` for a bad file."""
    shape, fortran, dtype = read_header(file, size)
    claimed = math.prod(shape) * dtype.itemsize
    check_size(claimed)
    raw = file.read(claimed)
    if len(raw) < claimed:
        raise EOFError(f"it holds {len(raw)} bytes of an array that takes {claimed}")
    # Read to the end, where a .npz file's checksum is verified.
    file.read(1)
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C").copy()
