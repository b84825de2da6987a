"""IDX files written here, plain and gzipped, whole and broken."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from splitfed.core.errors import InvalidInput
from splitfed.data import idx
from splitfed.data.sources.idx import read_idx
from tests.examples import refusal

IMAGES = np.array([[[0, 51], [102, 255]], [[255, 0], [0, 0]], [[5, 6], [7, 8]]], dtype=np.uint8)
LABELS = np.array([0, 2, 1], dtype=np.uint8)
KINDS = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def encode(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, KINDS[array.dtype.str[1:]], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(folder: Path, prefix: str, images: bytes, labels: bytes, suffix: str = "") -> None:
    pack = gzip.compress if suffix else bytes
    (folder / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(pack(images))
    (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(labels))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_folder(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, "train", encode(IMAGES), encode(LABELS), suffix)
    write(tmp_path, "t10k", encode(IMAGES[:1]), encode(LABELS[1:2]), suffix)
    data = idx(tmp_path)
    assert (data.shape, len(data), data.task.outputs, data.value_range) == ((1, 2, 2), 3, 3, (0.0, 1.0))
    assert data.name == tmp_path.name
    assert data.x[0].flatten().tolist() == pytest.approx([0.0, 0.2, 0.4, 1.0])
    assert data.y.tolist() == [0, 2, 1]
    assert idx(str(tmp_path), "test").y.tolist() == [2]
    assert idx(tmp_path, split="all").y.tolist() == [0, 2, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_type(tmp_path: Path, kind: str) -> None:
    array = np.array([[1, 2, 100], [4, 5, 6]], dtype=kind)
    (tmp_path / "array").write_bytes(encode(array))
    found = read_idx(tmp_path / "array")
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


BROKEN: list[tuple[bytes, str]] = [
    (b"", "begins with 0x; expected an IDX magic number, 0x0000tt0d"),
    (b"\x89PNG\r\n", "begins with 0x89504e47; expected an IDX magic number, 0x0000tt0d"),
    (b"\0\0\x07\x01", "begins with 0x00000701; expected an IDX magic number, 0x0000tt0d"),
    (encode(IMAGES)[:10], "is 10 bytes; its header alone takes 16"),
    # Header 4 + 3 x 4 = 16 bytes, and 3 images of 2 x 2 bytes.
    (encode(IMAGES)[:-1], "is 27 bytes; expected 28 for shape (3, 2, 2)"),
    (encode(IMAGES) + b"\0", "is 29 bytes; expected 28 for shape (3, 2, 2)"),
    (
        struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3),
        f"is 16 bytes; expected {16 + (2**32 - 1) ** 3} for shape",
    ),
]


@pytest.mark.parametrize(("raw", "text"), BROKEN)
def test_broken_file(tmp_path: Path, raw: bytes, text: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(raw)
    with pytest.raises(InvalidInput) as caught:
        read_idx(path)
    assert str(caught.value).startswith(f"{path} {text}")


def test_broken_gzip(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    whole = gzip.compress(encode(IMAGES))
    damaged = whole[:12] + bytes(6) + whole[18:]
    for raw in (whole[: len(whole) // 2], b"no gzip", damaged):
        path.write_bytes(raw)
        with pytest.raises(InvalidInput) as caught:
            read_idx(path)
        assert str(caught.value).startswith(f"{path} is no whole gzip file: ")
        assert "\n" not in str(caught.value)


def test_folder_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert refusal(idx, missing) == f"{missing} is missing; expected a folder"
    assert refusal(idx, tmp_path) == f"{tmp_path} has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz"
    assert refusal(idx, tmp_path, "tests") == "unknown split 'tests'; did you mean 'test'? (allowed: all, test, train)"
    images = tmp_path / "train-images-idx3-ubyte"
    assert refusal(idx, images) == f"{images} is missing; expected a folder"
    write(tmp_path, "train", encode(IMAGES), encode(LABELS[:2]))
    assert refusal(idx, tmp_path) == f"{images} has 3 images and train-labels-idx1-ubyte 2 labels"
    assert refusal(idx, images) == f"{images} is a file; expected a folder"
    write(tmp_path, "train", encode(LABELS), encode(LABELS))
    assert refusal(idx, tmp_path) == f"{images} has shape (3,) of uint8; expected 3-d bytes"
    with pytest.raises(InvalidInput, match=r" is a folder; expected a file$"):
        read_idx(tmp_path)
