"""Breast cancer: 569 real tumours, 30 measurements each, benign (1) or malignant (0), from scikit-learn.

Paper: Street, Wolberg and Mangasarian, "Nuclear Feature Extraction for Breast Tumor Diagnosis", SPIE
Biomedical Image Processing, 1993.
"""

from __future__ import annotations

import numpy as np

from splitfed.core.tasks import binary
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import from_arrays

# Units for radius, texture, perimeter, area, smoothness, compactness, concavity, concave points, symmetry and
# fractal dimension: of the mean over a tumour's cells, of its standard error, of the worst cells.
UNITS = (
    *(10.0, 10.0, 100.0, 1000.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1),
    *(1.0, 1.0, 1.0, 10.0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01),
    *(10.0, 10.0, 100.0, 1000.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1),
)


def breast_cancer(scaled: bool = True) -> Dataset:
    """Return x (569, 30) and a binary task.

    Columns differ by a factor of a million in size, so each is divided by its entry in `UNITS`, a fixed power of ten,
    and is then mostly between 0 and 10. Mean and standard deviation over all rows would leak test rows and victims into
    training; a constant leaks nothing. `scaled=False` returns the measurements unchanged.
    """
    # scikit-learn takes two seconds to import.
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    x = bunch.data / np.asarray(UNITS) if scaled else bunch.data
    return from_arrays(
        x, bunch.target, task=binary(), name="breast_cancer", columns=list(map(str, bunch.feature_names))
    )
