"""Digits: 1797 real handwritten digits of 8x8 pixels, shipped with scikit-learn.

Paper: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998
(its test set).
"""

from __future__ import annotations

import numpy as np

from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays


def digits() -> Dataset:
    """Return x (1797, 1, 8, 8) in [0, 1], the 17 levels of grey divided by 16, and ten classes."""
    # scikit-learn takes two seconds to import.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = bunch.images.astype(np.float32)[:, None] / 16
    return from_arrays(x, bunch.target, task=classification(10), name="digits", value_range=(0.0, 1.0))
