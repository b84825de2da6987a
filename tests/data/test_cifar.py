"""CIFAR in its binary version: files of three or four records written here, whole and broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.data import cifar


def record(labels: tuple[int, ...], red: int, green: int, blue: int) -> bytes:
    return bytes(labels) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


def ten(folder: Path) -> Path:
    for i in range(1, 6):
        (folder / f"data_batch_{i}.bin").write_bytes(record((i,), 51 * i, 0, 255) * 2)
    (folder / "test_batch.bin").write_bytes(record((9,), 0, 255, 0))
    return folder


def hundred(folder: Path) -> Path:
    (folder / "train.bin").write_bytes(record((19, 99), 1, 2, 3) + record((0, 42), 4, 5, 6))
    (folder / "test.bin").write_bytes(record((7, 0), 255, 255, 255))
    return folder


def test_ten_classes(tmp_path: Path) -> None:
    data = cifar(ten(tmp_path))
    assert (data.name, len(data), data.shape, data.task.outputs) == ("cifar10", 10, (3, 32, 32), 10)
    assert data.y.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert data.x[2, :, 31, 0].tolist() == pytest.approx([0.4, 0.0, 1.0])
    assert (len(cifar(tmp_path, "test")), len(cifar(tmp_path, "all")), data.value_range) == (1, 11, (0.0, 1.0))
    assert data.targets == {}


def test_hundred_classes_and_twenty_coarse_ones(tmp_path: Path) -> None:
    data = cifar(hundred(tmp_path), "all")
    assert (data.name, data.task.outputs, data.tasks["coarse"].outputs) == ("cifar100", 100, 20)
    assert (data.y.tolist(), data.label("coarse").tolist()) == ([99, 42, 0], [19, 0, 7])
    assert (data.x[1, :, 5, 5] * 255).round().tolist() == [4, 5, 6]


def test_refused(tmp_path: Path) -> None:
    def text(split: str = "train") -> str:
        with pytest.raises(InvalidInput) as caught:
            cifar(tmp_path, split)
        return str(caught.value)

    assert text() == f"{tmp_path} has no data_batch_1.bin and no train.bin; expected the binary version"
    ten(tmp_path)
    assert text("tests") == "unknown split 'tests'; did you mean 'test'? (allowed: all, test, train)"
    third = tmp_path / "data_batch_3.bin"
    third.write_bytes(record((3,), 0, 0, 0)[:-1])
    assert text() == f"{third} is 3072 bytes; expected records of 3073 bytes each, one at least"
    third.write_bytes(b"")
    assert text() == f"{third} is 0 bytes; expected records of 3073 bytes each, one at least"
    third.write_bytes(record((3,), 0, 0, 0) + record((10,), 0, 0, 0))
    assert text() == f"{third} has label 10 in record 1; cifar10 has 0 to 9 there"
    third.unlink()
    assert text() == f"{tmp_path} has no data_batch_3.bin; cifar10 needs it for split 'train'"
    third.mkdir()
    assert text() == f"{third} is a folder; expected a file"
    with pytest.raises(InvalidInput, match=r"is missing; expected a folder$"):
        cifar(tmp_path / "none")


def test_the_pickled_version_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}q\x01.")
    with pytest.raises(InvalidInput, match=r"expected the binary version$"):
        cifar(tmp_path)
