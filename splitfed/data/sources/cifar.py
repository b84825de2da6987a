"""CIFAR: a folder of the binary version of CIFAR-10 or CIFAR-100, whichever it holds.

Paper: Krizhevsky, "Learning multiple layers of features from tiny images", technical report, University of Toronto,
2009.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. Of the three versions published there this is the one of plain
bytes (cifar-10-binary, cifar-100-binary): the Python version would have to be unpickled, which runs whatever is in it.
A record is the label (CIFAR-100: the coarse one, then the fine one), and 3072 bytes: 32 x 32 red, green, blue.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays
from splitfed.data.sources.files import existing_file, existing_folder

PIXELS = 3 * 32 * 32
SPLITS = ("train", "test", "all")


class Kind(NamedTuple):
    """One of the two sets: its name, how many classes each label of a record has, and the files of each split."""

    name: str
    classes: tuple[int, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]

    def files(self, split: str) -> tuple[str, ...]:
        """Return the files of `split`."""
        return {"train": self.train, "test": self.test, "all": (*self.train, *self.test)}[split]


KINDS = (
    Kind("cifar10", (10,), tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)),
    Kind("cifar100", (20, 100), ("train.bin",), ("test.bin",)),
)


def cifar(folder: str | Path, split: str = "train") -> Dataset:
    """Return the images of `folder`, x (n, 3, 32, 32) in [0, 1], with 10 classes or 100.

    `split` is "train", "test" or "all". CIFAR-100 has its 20 coarse classes as the target "coarse". Raises
    `InvalidInput`, which names the file, if one of the published files is missing or malformed.
    """
    check_names("split", SPLITS, split)
    root = existing_folder(folder)
    there = {path.name for path in root.iterdir()}
    kind = next((kind for kind in KINDS if there & {*kind.train, *kind.test}), None)
    if kind is None:
        raise InvalidInput(f"{root} has no {KINDS[0].train[0]} and no {KINDS[1].train[0]}; expected the binary version")
    for name in kind.files(split):
        if name not in there:
            raise InvalidInput(f"{root} has no {name}; {kind.name} needs it for split {split!r}")
    records = np.concatenate([_records(root / name, kind) for name in kind.files(split)])
    labels, pixels = records[:, : len(kind.classes)].astype(np.int64), records[:, len(kind.classes) :]
    data = from_arrays(
        pixels.reshape(-1, 3, 32, 32).astype(np.float32) / 255,
        labels[:, -1],
        task=classification(kind.classes[-1]),
        name=kind.name,
        value_range=(0.0, 1.0),
    )
    if len(kind.classes) == 1:
        return data
    return data.with_target("coarse", torch.from_numpy(labels[:, 0].copy()), classification(kind.classes[0]))


def _records(path: Path, kind: Kind) -> np.ndarray:
    """Return the records of one file: (n, labels + pixels) bytes."""
    raw, size = existing_file(path).read_bytes(), len(kind.classes) + PIXELS
    if not raw or len(raw) % size:
        raise InvalidInput(f"{path} is {len(raw)} bytes; expected records of {size} bytes each, one at least")
    found = np.frombuffer(raw, np.uint8).reshape(-1, size)
    for place, count in enumerate(kind.classes):
        high = (found[:, place] >= count).nonzero()[0]
        if len(high):
            raise InvalidInput(
                f"{path} has label {found[high[0], place]} in record {high[0]}; {kind.name} has 0 to {count - 1} there"
            )
    return found
