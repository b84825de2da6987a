"""Types of objects that hold nothing a call of a model could change, and what shows that others may hold some.

Any other type whose state is not read is taken for one that changes: see `splitfed.core.unread_state`.
"""

from __future__ import annotations

import datetime
import operator
import random
import re
import struct
import threading
import types
import weakref
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from splitfed.core.plain_values import LEAVES, base_of, same, slots_of

_NUMBERS = (int, float, complex, str, bytes, Enum, PurePath, Decimal, Fraction, np.generic, np.dtype, np.ufunc)
_TIMES = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
_TEXTS = (re.Pattern, re.Match, struct.Struct, operator.itemgetter, operator.attrgetter, operator.methodcaller)
_OF_CLASSES = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.GenericAlias,
    types.UnionType,
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_OF_TORCH = (torch.finfo, torch.iinfo, torch.Stream, torch.Event, torch.utils.hooks.RemovableHandle)
VALUES: tuple[type, ...] = (*_NUMBERS, *_TIMES, *_TEXTS, types.BuiltinFunctionType)
"""Types of immutable values that a call may replace by others: two of them are told apart by what they are."""
UNCHANGING: tuple[type, ...] = (
    *(*LEAVES, *_NUMBERS, *_TIMES, *_TEXTS, *_OF_CLASSES, *_LOCKS, *_OF_TORCH),
    *(*weakref.ProxyTypes, BaseException, random.SystemRandom, type, types.ModuleType, types.FunctionType),
)
"""Types whose objects are immutable, or hold nothing that a model computes with."""
_TOOLS = ("logging", "torch.fx", "torch._", "torch.jit", "torch.utils", "splitfed.core")
_COMPILED = ("pybind11_", "PyCapsule")
"""How types begin by which compiled functions refer to their code."""
_CLOSED = ("_thread", "re", "io", "_io", "warnings", "multiprocessing", "concurrent", "asyncio")


class Opaque(NamedTuple):
    """Stands for an object that is not looked into: an immutable value, or one of which the class alone is known."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Opaque) or type(self.value) is not type(other.value):
            return False
        return not isinstance(self.value, VALUES) or same(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        """Tell an immutable value, and of others nothing; two that are the same are told alike."""
        return str(base_of(self.value, *VALUES).__repr__(self.value)) if isinstance(self.value, VALUES) else "..."


def is_closed(module: str) -> bool:
    """Return whether objects of the classes of `module` are not looked into, though they have attributes."""
    return _is_tool(module) or module.partition(".")[0] in _CLOSED


def _is_tool(module: str) -> bool:
    return module.startswith(_TOOLS) and not module.startswith("torch.utils.data")


def is_unchanging(value: Any) -> bool:
    """Return whether `value`, which is not looked into, holds nothing that changes.

    So do functions compiled by whatever package, loggers, and what torch traces and compiles with.
    """
    type_ = type(value)
    empty = not (hides_state(type_) or type_.__dictoffset__ or slots_of(type_))
    if empty or issubclass(type_, UNCHANGING) or _is_tool(type_.__module__) or type_.__name__.startswith(_COMPILED):
        return True
    # A descriptor of a compiled class, such as that of a field of a named tuple.
    if hasattr(type_, "__get__") and not type_.__dictoffset__:
        return True
    return callable(value) and isinstance(getattr(value, "__name__", None), str)


def hides_state(type_: type) -> bool:
    """Return whether objects of `type_` are larger than their attributes and slots, and so hold what is not read."""
    pointers = len(slots_of(type_)) + (type_.__dictoffset__ > 0) + (type_.__weakrefoffset__ > 0)
    return bool(type_.__itemsize__) or type_.__basicsize__ > object.__basicsize__ + pointers * tuple.__itemsize__
