"""Digits: 1797 real handwritten digits of 8x8 pixels, shipped with scikit-learn.

Paper: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998
(its test set).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays


def digits() -> Dataset:
    """Return x (1797, 1, 8, 8) in [0, 1], the 17 levels of grey divided by 16, and ten classes."""
    levels, labels = _read()
    x = levels.astype(np.float32).reshape(-1, 1, 8, 8) / 16
    return from_arrays(x, labels, task=classification(10), name="digits", value_range=(0.0, 1.0))


@cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Return the levels of grey (1797, 64) and the classes (1797,), read once and shared: do not write into them."""
    found = find_spec("sklearn")
    if found is not None and found.origin is not None:
        # Read the file directly: scikit-learn takes as long to import as torch.
        file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            table = np.loadtxt(file, delimiter=",", dtype=np.int64)
            return table[:, :-1].astype(np.uint8), table[:, -1]
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.data.astype(np.uint8), bunch.target
