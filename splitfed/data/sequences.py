"""Sequences of unequal length as rows: padded to one length, with a mask of the positions that are no padding.

All rows of a run have one shape, so that messages, counts of bytes and privacy guarantees by row do not depend on which
rows are drawn together; the mask lets a model ignore the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_number
from splitfed.data.conversion import as_tensor, as_type
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import Array, RowType, TaskLike, from_arrays

NAMES = ("input_ids", "attention_mask")


def from_sequences(
    sequences: Sequence[Array | Sequence[float]],
    y: Array | Sequence[float],
    *,
    pad: float = 0,
    longest: int | None = None,
    names: tuple[str, str] = NAMES,
    dtype: RowType = "int64",
    task: TaskLike = None,
    name: str = "sequences",
) -> Dataset:
    """Return a data set of `sequences` of unequal length, each padded at its end.

    sequences: (length, ...) numbers each, length >= 1, of equal shape beyond the length. y, `task` and `dtype` as in
    `from_arrays`. `pad`: the padding value; `longest`: the padded length (default: that of the longest sequence).
    `names`: of the two parts of a row, which are the arguments of the model: the sequence, (longest, ...), and its
    mask, (longest,), 1 for numbers and 0 for padding. Raises `InvalidInput` for a sequence that is empty, longer than
    `longest` or of another width.
    """
    check_number("pad", pad)
    if len(sequences) == 0:
        raise InvalidInput(f"{name}: there are no sequences; expected at least one, of numbers")
    rows = [as_type(f"{name}: sequence {i}", _read(name, i, one), dtype) for i, one in enumerate(sequences)]
    widths = [tuple(row.shape[1:]) for row in rows]
    if wrong := next((i for i, width in enumerate(widths) if width != widths[0]), None):
        raise InvalidInput(f"{name}: sequence {wrong} has width {widths[wrong]}; expected {widths[0]} as sequence 0")
    lengths = [len(row) for row in rows]
    if longest is None:
        longest = max(lengths)
    check_count("longest", longest, low=1)
    if max(lengths) > longest:
        place = next(i for i, length in enumerate(lengths) if length > longest)
        raise InvalidInput(
            f"{name}: sequence {place} has {lengths[place]} numbers, more than longest={longest}: shorten it, or "
            "raise longest"
        )
    padded = torch.full((len(rows), longest, *widths[0]), pad, dtype=rows[0].dtype)
    mask = torch.zeros(len(rows), longest, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
        mask[i, : len(row)] = 1
    if isinstance(names, str) or len(set(names)) != 2:
        raise InvalidInput(f"names={names!r} is not allowed; expected two, of the sequence and of its mask")
    labels = y if isinstance(y, (Tensor, np.ndarray)) else torch.tensor(y)
    return from_arrays({names[0]: padded, names[1]: mask}, labels, task=task, name=name, dtype=dtype)


def _read(name: str, i: int, given: Any) -> Tensor:
    """Return sequence `i`, which may be a list of numbers, as a tensor."""
    found = as_tensor(f"{name}: sequence {i}", torch.tensor(given) if isinstance(given, (list, tuple)) else given)
    if found.dim() == 0 or found.numel() == 0:
        raise InvalidInput(f"{name}: sequence {i} is empty; expected at least one number")
    return found
