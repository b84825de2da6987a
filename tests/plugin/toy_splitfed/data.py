"""Toy digits: the first rows of the digits.

Paper: none; an example of a plug-in.
"""

from __future__ import annotations

from splitfed.data.dataset import Dataset
from splitfed.data.sources.digits import digits


def toy_digits(rows: int = 300) -> Dataset:
    """Return the first `rows` digits."""
    return digits().rows(range(rows))
