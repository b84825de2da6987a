"""Conversion of numbers of any kind (tensors, arrays, parts of rows) to rows of float32 or int64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_names
from splitfed.data.features import Feature, adjacent_features

_EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**24, torch.float64: 2**53}
"""Largest magnitude up to which a floating-point type represents every integer."""


def as_tensor(what: str, value: Any, share: bool = False) -> Tensor:
    """Return numbers (a tensor, an array or one number) as a CPU tensor.

    The tensor is a copy; with `share` it uses the memory of `value`, if that has a kept type and is writable.
    """
    match value:
        case Tensor():
            check_dense(what, value)
            tensor = value.detach().to("cpu", copy=not share)
        case np.ndarray() | np.generic() | int() | float():
            shared = share and isinstance(value, np.ndarray) and value.flags.c_contiguous and value.flags.writeable
            array = np.asarray(value) if shared else np.array(value, order="C")
            if array.dtype.kind not in "biuf":
                raise InvalidInput(f"{what} has type {array.dtype}; expected real numbers")
            if array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63:
                raise InvalidInput(f"{what} holds {int(array.max())}; expected whole numbers below 2**63")
            # torch supports neither foreign byte order nor long doubles, and few operations on unsigned types.
            reals = np.float32 if array.itemsize <= 4 else np.float64
            tensor = torch.from_numpy(array.astype(reals if array.dtype.kind == "f" else np.int64, copy=False))
        case _:
            raise InvalidInput(f"{what} is a {type(value).__name__}; expected a tensor, an array or a number")
    if tensor.is_complex():
        raise InvalidInput(f"{what} is complex; expected real numbers")
    if tensor.dtype == torch.uint64:
        return as_tensor(what, tensor.numpy())
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


def check_dense(what: str, tensor: Tensor) -> None:
    """Raise `InvalidInput` for a tensor that is not dense."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "meta"
        kind = kind if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")
        raise InvalidInput(f"{what} is a {kind} tensor; expected a dense one, whose numbers are in memory")


def as_rows(what: str, value: Any, dtype: str, share: bool = False) -> Tensor:
    """Return numbers as rows (n, ...) of `dtype`, see `as_tensor` and `as_type`; (n,) becomes one column."""
    tensor = as_type(what, as_tensor(what, value, share), dtype)
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def check_finite(what: str, tensor: Tensor) -> None:
    """Raise `InvalidInput` for numbers (rows, ...) with a missing or infinite one; the error names the row."""
    if len(bad := (~torch.isfinite(tensor)).nonzero()):
        where = f" in row {int(bad[0, 0])}, counted from 0" if tensor.dim() else ""
        raise InvalidInput(f"{what} is not finite{where}; fill in missing values, or leave the row out")


def as_type(what: str, tensor: Tensor, dtype: str) -> Tensor:
    """Return `tensor`, a result of `as_tensor`, as `dtype`: "float32" or "int64".

    Raises `InvalidInput` for integers that float32 cannot represent, and, with "int64", for fractions and for
    floating-point numbers too large to represent every integer.
    """
    check_names("dtype of rows", ("float32", "int64"), dtype)
    if dtype == "float32":
        made = tensor.to(torch.float32)
        if not tensor.is_floating_point() and bool((rounded := made.to(torch.int64) != tensor).any()):
            where, whole = int(rounded.nonzero()[0, 0]) if rounded.dim() else 0, int(tensor[rounded][0])
            raise InvalidInput(
                f"{what} holds {whole} in row {where}, counted from 0, which float32 cannot represent; take "
                "dtype='int64' for codes, or scale it"
            )
        return made
    if tensor.is_floating_point():
        bad = (tensor != tensor.round()) | (tensor.abs() > _EXACT[tensor.dtype])
        if bool(bad.any()):
            row, number = int(bad.nonzero()[0, 0]) if bad.dim() else 0, float(tensor[bad][0])
            raise InvalidInput(
                f"{what} holds {number:g} in row {row}, counted from 0; dtype='int64' expects whole numbers"
            )
    return tensor.to(torch.int64)


def join_parts(name: str, parts: Mapping[str, Any], dtype: str) -> tuple[Tensor, dict[str, Feature]]:
    """Return rows that join `parts`, name -> (n, ...), and the position of each part in a flattened row."""
    if not parts:
        raise InvalidInput(f"{name}: x has no part; expected name -> (n, ...), at least one")
    found = {part: as_tensor(f"{name}: {part!r}", value, share=True) for part, value in parts.items()}
    real = [part for part, value in found.items() if value.is_floating_point()]
    if real and len(real) < len(found):
        whole = next(part for part in found if part not in real)
        raise InvalidInput(
            f"{name}: {real[0]!r} holds real numbers and {whole!r} whole ones; all parts of a row have one type, as "
            f"float32 cannot distinguish whole numbers above {2**24}: convert one of them"
        )
    rows = {part: as_rows(f"{name}: {part!r}", value, dtype, share=True) for part, value in found.items()}
    counts = {part: len(value) if value.dim() else 0 for part, value in rows.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{part!r} has {count}" for part, count in counts.items())
        raise InvalidInput(f"{name}: {listed} rows; expected as many in every part")
    features = adjacent_features(rows)
    if len({feature.shape for feature in features.values()}) == 1:
        return torch.stack(list(rows.values()), 1), features
    return torch.cat([value.flatten(1) for value in rows.values()], 1), features
