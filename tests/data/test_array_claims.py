"""Files of strangers that claim more than they hold, or hold more than anybody can: refused before it is read."""

from __future__ import annotations

import bz2
import gzip
import io
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitfed.core.errors import InvalidInput
from splitfed.data import arrays
from splitfed.data.sources.csv import csv
from splitfed.data.sources.idx import read_idx
from splitfed.data.sources.npz import npz
from splitfed.study.run.input_rows import read_rows

TERA = 2**40


def header(shape: str, kind: str = "<f4") -> bytes:
    """Return the beginning of a .npy file with whatever is given for a shape."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


def packed(path: Path, content: bytes, method: int = zipfile.ZIP_STORED, name: str = "x.npy") -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, content)
        archive.writestr("y.npy", header("(2,)", "<i8") + bytes(16))
    return path


def claiming(path: Path, size: int) -> Path:
    """Return a .npz file whose directory says that x.npy takes `size` bytes, unpacked."""
    packed(path, header(f"({size // 4},)") + bytes(4000), zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x01\x02")
    content[place + 24 : place + 28] = struct.pack("<I", size)
    path.write_bytes(content)
    return path


def bomb(path: Path) -> Path:
    """Return a .npz file of a third of a megabyte that unpacks to 320 MiB, as its header says too."""
    size = 320 * 2**20
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as file:
            file.write(header(f"({size // 4},)"))
            for _ in range(size // 2**20):
                file.write(bytes(2**20))
        archive.writestr("y.npy", header("(2,)", "<i8") + bytes(16))
    return path


NO_HEADER = "its header does not say shape, order and type of an array"
CLAIMS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "terabytes": (lambda p: packed(p, header(f"({TERA},)")), f"which takes {4 * TERA} bytes; it holds 0"),
    "more than numbers count": (lambda p: packed(p, header(f"({2**62}, {2**62})")), "bytes; it holds 0"),
    "a negative shape": (lambda p: packed(p, header("(-1, 4)")), "it claims shape (-1, 4)"),
    "a little more": (lambda p: packed(p, header("(3,)") + bytes(8)), "which takes 12 bytes; it holds 8"),
    "no number": (lambda p: packed(p, header("('a',)")), NO_HEADER),
    "a power": (lambda p: packed(p, header("(10**12,)")), NO_HEADER),
    "deep": (lambda p: packed(p, header("(" * 4000 + ")" * 4000)), NO_HEADER),
    "objects": (lambda p: packed(p, header("(1,)", "|O") + bytes(8)), "would have to be unpickled"),
    "the directory": (lambda p: claiming(p, 2**31), "unpack to 1032 times as many at most"),
    "nothing in many": (lambda p: packed(p, header(f"({TERA},)", "|V0")), ""),
    "a zip bomb": (bomb, "which real data does not; save it without compression"),
    "another packing": (lambda p: packed(p, header("(1,)") + bytes(4), zipfile.ZIP_LZMA), "with numpy.savez"),
    "no version": (lambda p: packed(p, b"\x93NUMPY\x09\x00" + bytes(100)), "it is of version 9.0"),
    "no array": (lambda p: packed(p, b"pickle"), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(CLAIMS))
def test_what_an_npz_file_claims_is_checked_first(kind: str, tmp_path: Path) -> None:
    make, text = CLAIMS[kind]
    path = make(tmp_path / "data.npz")
    for read in (lambda: npz(path), lambda: read_rows(path, (2,))):
        tracemalloc.start()
        began = time.process_time()
        with pytest.raises(InvalidInput) as caught:
            read()
        taken, (_, most) = time.process_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert str(path) in str(caught.value)
        assert text in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert most < 2**24, "nothing of that size was asked for"
        assert taken < 3


def test_arrays_of_all_makes_are_read_as_numpy_does(tmp_path: Path) -> None:
    made = {
        "plain": np.arange(12, dtype=np.float32).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "big": np.arange(3, dtype=">i2"),
        "one": np.array(5.0),
        "none": np.zeros((0, 4)),
        "text": np.array(["a", "bc"]),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "all.npz", **made)  # type: ignore[arg-type]
        assert arrays.array_names(tmp_path / "all.npz") == list(made)
        for name, expected in made.items():
            found = arrays.read_member(tmp_path / "all.npz", name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
            assert found.flags.writeable


def test_honest_zeros_are_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((2**20, 8), np.float32), y=np.arange(2**20) % 2)
    assert not arrays.read_member(tmp_path / "zeros.npz", "x").any()


def test_more_than_the_machine_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "memory", lambda: 1000)
    np.save(tmp_path / "x.npy", np.ones((300, 2), np.float32))
    with pytest.raises(InvalidInput, match=r"it claims 2400 bytes; this machine has 1000 bytes of memory"):
        read_rows(tmp_path / "x.npy", (2,))


def idx_header(*shape: int, kind: int = 8) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape)


IDX: list[tuple[str, Callable[[], bytes], str]] = [
    ("a", lambda: idx_header(*[1] * 255) + b"\0", "claims 255 dimensions; expected 1 to 8"),
    ("a", lambda: idx_header() + b"\0", "claims 0 dimensions; expected 1 to 8"),
    ("a", lambda: idx_header(*[1] * 9) + b"\0", "claims 9 dimensions; expected 1 to 8"),
    ("a", lambda: idx_header(0, 2**32 - 1, 2**32 - 1, 2**32 - 1), "expected at least one number"),
    ("a", lambda: idx_header(2**32 - 1, 2**32 - 1), "is 12 bytes; expected "),
    ("a.gz", lambda: gzip.compress(idx_header(2**32 - 1, 2**32 - 1)), "unpack to 1032 times as many at most"),
    ("a.gz", lambda: gzip.compress(idx_header(3) + bytes(2**25)), "is more bytes; expected 11 for shape (3,)"),
    ("a.gz", lambda: gzip.compress(idx_header(320 * 2**20) + bytes(320 * 2**20)), "which real data does not"),
    ("a.gz", lambda: gzip.compress(idx_header(100) + bytes(99)), "is 107 bytes; expected 108 for shape (100,)"),
]


@pytest.mark.parametrize(("name", "make", "text"), IDX, ids=[text for _, _, text in IDX])
def test_what_an_idx_file_claims_is_checked_first(name: str, make: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(make())
    began = time.process_time()
    with pytest.raises(InvalidInput) as caught:
        read_idx(tmp_path / name)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert time.process_time() - began < 3


def table() -> bytes:
    text = io.StringIO()
    text.write("a,b,y\n")
    text.writelines(f"{i},{i * 2},{i % 2}\n" for i in range(40))
    return text.getvalue().encode()


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), ("", bytes)])
def test_a_packed_table_is_read(suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / f"t.csv{suffix}"
    path.write_bytes(pack(table()))
    assert csv(path, "y").x.tolist()[3] == [3.0, 6.0]


CSV: list[tuple[str, Callable[[], bytes], str]] = [
    ("t.csv.gz", lambda: gzip.compress(table())[:40], "cannot be read as CSV: "),
    ("t.csv.gz", lambda: b"junk", "cannot be read as CSV: "),
    (
        "t.csv.bz2",
        lambda: bz2.compress(b"a,y\n" + b"\n" * 65 * 2**20),
        "which real tables do not; unpack it if that is intended",
    ),
    ("t.csv.xz", lambda: b"junk", "cannot be read as CSV: "),
    ("t.csv.zip", lambda: b"PK", "is packed as .zip; unpack it, or pack it as .gz, .bz2 or .xz"),
    ("t.csv", lambda: table()[:-4], "column 'y' has no value in row 40"),
    ("t.csv", lambda: b"a,b,y\n\0\0\0", ""),
]


@pytest.mark.parametrize(("name", "make", "text"), CSV, ids=[f"{name} {text[:20]}" for name, _, text in CSV])
def test_a_table_that_is_cut_or_a_trap_is_one_line(name: str, make: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(make())
    with pytest.raises(InvalidInput) as caught:
        csv(tmp_path / name, "y")
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
