"""Files that somebody else wrote: each is refused in one line, and none holds up or fills the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image, PngImagePlugin

from splitfed.data import cifar, csv, domain_folder, idx, image_folder, leaf, npy, npz, parquet
from splitfed.data.sources.images import FORMATS, SUFFIXES
from tests.examples import refusal

NO_FILE = "is a pipe, socket or device; expected a file"
LOADERS: dict[str, Callable[[Path], object]] = {
    "csv": lambda path: csv(path, "y"),
    "npz": npz,
    "npy": lambda path: npy(path, path),
    "parquet": lambda path: parquet(path, "y"),
    "leaf": leaf,
}


@pytest.mark.parametrize("name", LOADERS)
def test_pipes_and_devices_are_no_files(name: str, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (pipe, Path("/dev/zero")):
        assert refusal(LOADERS[name], path) == f"{path} {NO_FILE}"


def test_pipes_in_folders(tmp_path: Path) -> None:
    for name in ("all_data_0.json", "data_batch_1.bin", "train-images-idx3-ubyte"):
        os.mkfifo(tmp_path / name)
    assert refusal(leaf, tmp_path) == f"{tmp_path / 'all_data_0.json'} {NO_FILE}"
    for i in range(2, 6):
        (tmp_path / f"data_batch_{i}.bin").write_bytes(b"")
    assert refusal(cifar, tmp_path) == f"{tmp_path / 'data_batch_1.bin'} {NO_FILE}"
    assert refusal(idx, tmp_path).startswith(f"{tmp_path} has neither train-images-idx3-ubyte nor")


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "a\x1bb"])
def test_a_path_is_shown_in_one_line(name: str) -> None:
    assert refusal(npz, name) == f"{name!r} is missing; expected a file"


def pictures(root: Path) -> Path:
    """Write two classes of one picture, and return the path of a second one of the first class."""
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(root / name / "0.png")
    return root / "a" / "1.png"


def test_a_picture_in_eps_starts_no_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", start)
    path = pictures(tmp_path)
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n")
    assert refusal(image_folder, tmp_path).startswith(f"{path} cannot be read as a picture: cannot identify image file")


def test_every_suffix_has_its_format() -> None:
    Image.init()
    assert {Image.EXTENSION[suffix] for suffix in SUFFIXES} == {*FORMATS}


def test_text_bombs_and_large_pictures(tmp_path: Path) -> None:
    path, bound = pictures(tmp_path), Image.MAX_IMAGE_PIXELS
    text = PngImagePlugin.PngInfo()
    text.add_text("k", "x" * 2**22, zip=True)
    Image.new("RGB", (4, 4)).save(path, pnginfo=text)
    assert refusal(image_folder, tmp_path).startswith(f"{path} cannot be read as a picture: Decompressed data too")
    Image.new("1", (20000, 20000)).save(path)
    assert refusal(image_folder, tmp_path) == (
        f"{path} has 400000000 pixels; expected at most 33554432 (argument pixels)"
    )
    Image.new("1", (40, 40)).save(path)
    assert refusal(image_folder, tmp_path, size=4, pixels=1599) == (
        f"{path} has 1600 pixels; expected at most 1599 (argument pixels)"
    )
    assert len(image_folder(tmp_path, size=4, pixels=1600).x) == 3
    assert bound == Image.MAX_IMAGE_PIXELS


def test_pixels_of_a_domain_folder(tmp_path: Path) -> None:
    pictures(tmp_path / "one")
    pictures(tmp_path / "two")
    assert "has 16 pixels; expected at most 15 (argument pixels)" in refusal(domain_folder, tmp_path, pixels=15)
    assert len(domain_folder(tmp_path, pixels=16).x) == 4


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no such file here")
@pytest.mark.parametrize("name", LOADERS)
def test_a_file_that_cannot_be_read_is_one(name: str) -> None:
    assert refusal(LOADERS[name], Path("/proc/self/mem")) == "/proc/self/mem cannot be read: Input/output error"


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("\ufeffy,x\n1,0\n0,1\n".encode())
    assert csv(path, "y").y.tolist() == [1, 0]
    path.write_text(",".join(f"c{i}" for i in range(20000)) + "\n" + ",".join(["1"] * 20000) + "\n")
    assert refusal(csv, path, "c0") == f"{path} has 20000 columns; expected at most 16384 (argument most_columns)"
    path.write_text("x,y\n" + "1" * 100000 + ",0\n2,1\n")
    assert refusal(csv, path, "y") == (
        f"{path}: column 'x' has a whole number of 100000 digits in row 1, more than 64 bits hold; drop the column, or "
        "write it shorter"
    )
    path.write_text("x,y,z\n1,0,1\n2,1,0\n")
    assert refusal(csv, path, "y", most_columns=2).endswith("has 3 columns; expected at most 2 (argument most_columns)")
    assert csv(path, "y", most_columns=3).x.tolist() == [[1, 1], [2, 0]]
    path.write_bytes(b"x" * (2**22 + 1))
    assert refusal(csv, path, "y") == f"{path} has a header of more than 4194304 bytes; expected names of columns"


def test_very_many_columns_are_counted_before_pandas_makes_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,"b, or c",y\r1,2,0\r2,3,1\r')
    assert csv(path, "y", most_columns=3).columns == ("a", "b, or c")
    monkeypatch.setattr(pd, "read_csv", None)
    path.write_text(",".join(f"c{i}" for i in range(300000)) + "\n1\n")
    assert refusal(csv, path, "c0") == f"{path} has 300000 columns; expected at most 16384 (argument most_columns)"


def test_numbers_in_json(tmp_path: Path) -> None:
    path = tmp_path / "all_data_0.json"
    for digits, text in ((100000, "is no JSON"), (400, "has values other than finite numbers in x")):
        x = "[[" + "1" * digits + "]]"
        path.write_text(f'{{"users": ["a"], "num_samples": [1], "user_data": {{"a": {{"x": {x}, "y": [0]}}}}}}')
        assert text in refusal(leaf, tmp_path)
