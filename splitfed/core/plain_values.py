"""Plain values, as numbers, texts and tuples of them: what they are, when two are the same, and names of entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import starmap
from operator import is_
from pathlib import PurePath
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Held = dict["Key", Any]
_MANY = 2**14

LEAVES: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, CodeType}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""Types of plain values."""


class Key(NamedTuple):
    """How one object holds another: `role` is "attribute", "item", "global", "variable", "default" and the like."""

    role: str
    name: Any


class Identity:
    """An object as the name of an entry: a key of a table, a member of a set."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return type(self.value).__name__


def is_leaf(value: Any) -> bool:
    """Return whether `value` is plain: a number, a text, None, a tuple of these."""
    kind = type(value)
    if kind in LEAVES:
        return True
    if kind is tuple:
        return all(map(is_leaf, value))
    return issubclass(kind, (Enum, np.generic, PurePath))


def same(one: Any, other: Any) -> bool:
    """Return whether two plain values, or data of objects, are the same; a NaN is the same as itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and bool(one.tobytes() == other.tobytes())
    if isinstance(one, Tensor):
        return same_tensors(one, other)
    try:
        if bool(one == other) and not (isinstance(one, dict) and list(one) != list(other)):
            return True
        return repr(one) == repr(other)
    except (TypeError, ValueError, RuntimeError):
        return False


def equal_tensors(one: Tensor, other: Tensor) -> bool:
    """Return what `torch.equal` does of two tensors of one shape and type; of many numbers, True of the same bytes."""
    if one.dtype is torch.float32 and one.numel() >= _MANY and one.numel() % 2 == 0:
        pair = [t.detach().view(-1) for t in (one, other) if t.is_contiguous() and t.storage_offset() % 2 == 0]
        # In words of 64 bits, which takes two thirds of the time.
        if len(pair) == 2 and torch.equal(*(t.view(torch.int64) for t in pair)):
            return True
    return torch.equal(one, other)


def same_tensors(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, type and numbers, NaN included; on meta: shape and type."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device or one.layout != other.layout:
        return False
    if one.is_meta:
        return True
    if one.layout is not torch.strided and len(parts := dense_parts(one)) > 1:
        return all(starmap(same_tensors, zip(parts, dense_parts(other), strict=True)))
    if equal_tensors(one, other):
        return True
    # Whether there is a NaN at all shows in the sum, which is found without a mask of them.
    if not (one.is_floating_point() or one.is_complex()) or not bool(one.sum().isnan()):
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the places and the numbers that a sparse tensor keeps, as dense tensors; a dense one itself."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def all_plain(values: Iterable[Any]) -> bool:
    """Return whether all of `values` are plain."""
    types = set(map(type, values))
    return types <= LEAVES or (
        all(t in LEAVES or t is tuple or issubclass(t, (Enum, np.generic)) for t in types) and all(map(is_leaf, values))
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the table of attributes of `value` itself; an empty one where it has none."""
    try:
        # A thread has a table of its own.
        own = threading.local if isinstance(value, threading.local) else object
        found = own.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def slots_of(type_: type) -> list[str]:
    """Return the names of the attributes of `type_` that stand in slots."""
    found: list[str] = []
    for base in type_.__mro__:
        own = base.__dict__.get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            if name in ("__dict__", "__weakref__"):
                continue
            found.append(f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name)
    return found


def base_of(value: Any, *bases: type) -> Any:
    """Return the first of `bases` that `value` is an object of; its methods run no code of a class of the user's."""
    return next(base for base in bases if isinstance(value, base))


def entries_of(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return keys and values of `table` in its order, without asking a class of the user's, which may make new ones."""
    return list(base_of(table, OrderedDict, dict).items(table))


def members_of(members: Iterable[Any]) -> list[Any]:
    """Return the members of a set of numbers in its order; of another, which each process has in another, sorted."""
    found = list(members)
    return found if all(type(one) in (bool, int, float, complex) for one in found) else sorted(found, key=repr)


def refill(table: dict[Any, Any], wanted: Mapping[Any, Any]) -> None:
    """Let `table` hold `wanted` in its order, without a write where it does."""
    now = entries_of(table)
    if len(now) == len(wanted) and all(
        (k is name or (not isinstance(k, Tensor) and k == name)) and one is value
        for (k, one), (name, value) in zip(now, wanted.items(), strict=True)
    ):
        return
    base = base_of(table, OrderedDict, dict)
    base.clear(table)
    for name, value in wanted.items():
        base.__setitem__(table, name, value)


def set_attributes(table: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """Let `table` hold `wanted`, and no more."""
    for name in [n for n in table if n not in wanted]:
        del table[name]
    missing = object()
    for name, value in wanted.items():
        if table.get(name, missing) is not value:
            table[name] = value


def same_entries(now: Mapping[Any, Any], kept: Mapping[Any, Any]) -> bool:
    """Return whether two tables have the same keys in the same order, and the very same values."""
    return len(now) == len(kept) and all(map(is_, now, kept)) and all(map(is_, now.values(), kept.values()))
