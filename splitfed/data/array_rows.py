"""Rows of an array that is not in memory, such as a memory-mapped file: converted a batch at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.rows import Draw, RowSource
from splitfed.data.conversion import as_rows


class ArrayRows(RowSource):
    """Rows of `array` (n, ...) as `dtype`, "float32" or "int64"; (n,) is read as one column.

    `pixels`: bytes are divided by 255, and images without a channel get one. `channels_last`: the rows of the array are
    (height, width, channels). `what`: the prefix of errors.
    """

    def __init__(
        self, what: str, array: np.ndarray, dtype: str, *, pixels: bool = False, channels_last: bool = False
    ) -> None:
        if array.dtype.kind not in "biuf":
            raise InvalidInput(f"{what} has type {array.dtype}; expected real numbers")
        if array.ndim == 0 or array.size == 0:
            raise InvalidInput(f"{what} has shape {array.shape}; expected (rows, ...) with at least one row")
        # As a plain array: results of operations on a memory map would be memory maps, although they are in memory.
        self._what, self._array, self._kind = what, np.asarray(array), dtype
        self._pixels, self._channels_last = pixels, channels_last
        first = self._convert(self._array[:1])
        self.shape, self.dtype = tuple(first.shape[1:]), first.dtype

    def __len__(self) -> int:
        return len(self._array)

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers, read from the array."""
        if len(rows) == 0:
            return torch.empty(0, *self.shape, dtype=self.dtype)
        return self._convert(self._array[rows.numpy()])

    def _convert(self, few: np.ndarray) -> Tensor:
        if self._channels_last:
            few = few.transpose(0, 3, 1, 2)
        if self._pixels:
            few = (few[:, None] if few.ndim == 3 else few).astype(np.float32) / 255
        return as_rows(self._what, few, self._kind, share=True)
