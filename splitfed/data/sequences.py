"""Sequences of unequal length as rows: padded to the longest, with a mask that says what is no padding.

All rows of a run have one shape, so that messages, counts of bytes and promises by row do not depend on which rows are
drawn together; a mask beside the rows lets a model leave the padding out.
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
    """Return a data set of `sequences` of unequal length, each padded behind its end.

    sequences: (length, ...) numbers each, of one width beyond the length, at least one number long. y, `task` and
    `dtype` as in `from_arrays`. `pad`: what stands behind the end; `longest`: to which length (default: that of the
    longest sequence). `names`: of the two parts of a row, which are the arguments of the model: the sequence,
    (longest, ...), and its mask, (longest,), 1 where it has numbers and 0 behind. Raises `InvalidInput` for a sequence
    that is empty, longer than `longest` or of another width.
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
            f"{name}: sequence {place} has {lengths[place]} numbers, more than longest={longest}: cut it, or take more"
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
    """Return sequence `i` as a tensor; a list of numbers is one too."""
    found = as_tensor(f"{name}: sequence {i}", torch.tensor(given) if isinstance(given, (list, tuple)) else given)
    if found.dim() == 0 or found.numel() == 0:
        raise InvalidInput(f"{name}: sequence {i} is empty; expected at least one number")
    return found
