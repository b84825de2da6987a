"""Arrays from .npz files: names, images, domains and broken files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitfed.core.errors import InvalidInput
from splitfed.data import npz
from tests.examples import refusal


def test_numbers(tmp_path: Path) -> None:
    path = tmp_path / "toy.npz"
    np.savez(path, features=np.eye(3), labels=np.array([1, 0, 1]), site=np.array([4, 4, 5]))
    data = npz(path, x="features", y="labels", domains="site")
    assert (data.name, data.task.name, data.value_range) == ("toy", "classification", None)
    assert data.x.tolist() == np.eye(3).tolist()
    assert data.y.tolist() == [1, 0, 1]
    assert data.domains is not None
    assert data.domains.tolist() == [4, 4, 5]
    assert npz(path, "features", "labels", task="binary").task.name == "binary"


def test_images(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    pixels = np.zeros((2, 4, 5, 3), dtype=np.uint8)
    pixels[1, 3, 2, 1] = 255
    np.savez_compressed(path, x=pixels, gray=pixels[..., 0], y=np.array([[0], [1]]))
    data = npz(path, channels_last=True)
    assert (data.shape, data.value_range, float(data.x[1, 1, 3, 2]), float(data.x.sum())) == (
        (3, 4, 5),
        (0.0, 1.0),
        1.0,
        1.0,
    )
    assert npz(path, x="gray").shape == (1, 4, 5)
    with pytest.raises(InvalidInput, match=r"^channels_last=True needs 4 dimensions; 'gray' in .* shape \(2, 4, 5\)$"):
        npz(path, x="gray", channels_last=True)


def test_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.npz"
    assert refusal(npz, path) == f"{path} is missing; expected a file"
    path.write_bytes(b"no archive")
    assert refusal(npz, path) == f"{path} is no whole .npz file: File is not a zip file"
    np.savez(path, x=np.eye(3), labels=np.zeros(3, dtype=int))
    assert refusal(npz, path, y="label") == (
        f"unknown array in {path}: 'label'; did you mean 'labels'? (allowed: labels, x)"
    )
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    path.write_bytes(raw)
    assert refusal(npz, path, y="labels").startswith(f"{path} is no whole .npz file: Bad CRC-32")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "objects.npz"
    np.savez(path, x=np.array([{}, {}], dtype=object), y=np.zeros(2))
    with pytest.raises(InvalidInput, match=r"holds an array that cannot be read: Object arrays cannot be loaded"):
        npz(path)
