"""What a party of a replayed model has in place of attributes that other parties read: their form without numbers.

A party runs the user's `forward` from the top, over the code of earlier segments, which reads their attributes. For
these it has stand-ins: of a tensor its shape on the meta device, of an array, a container, an object or a function one
of the same form in which every number is blank. They are handed out there alone; where its own operations run, the
attribute is not there.
"""

from __future__ import annotations

import array
import copy
import enum
import operator
import types
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.code_kinds import is_installed
from splitfed.core.payload import not_dense
from splitfed.core.plain_values import attributes_of, slots_of
from splitfed.core.unchanging import hides_state, is_closed

_BLANK_INTEGER = int(np.iinfo(np.int64).min)
_NUMBERS = "?bBhHiIlLqQnNefdgFDG"
# Up to so many whole numbers together are a setting, such as the size of a kernel.
_FEW = 8
_KEPT = (nn.Module, type, types.ModuleType, types.CodeType, torch.Generator, str, torch.dtype, torch.device, enum.Enum)


class StandIns:
    """The stand-ins of one module, attribute -> stand-in; `kept_alive`: what weak references among them lead to."""

    def __init__(self, values: Mapping[str, Any], kept_alive: list[Any]) -> None:
        self.values, self.kept_alive = dict(values), kept_alive

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIns:
        """Return copies, of what `copy.deepcopy` shares too: functions, and what weak references lead to."""
        values = copy.deepcopy(self.values, memo)
        made = Blanking({id(one): one for one in memo.values() if isinstance(one, Tensor)})
        return StandIns({name: made.stand_in(value) for name, value in values.items()}, made.kept_alive)


class Blanking:
    """Makes stand-ins; `own`: identity of what is a party's own, modules and weights -> what is put in its place."""

    def __init__(self, own: Mapping[int, Any]) -> None:
        self._made: dict[int, Any] = dict(own)
        self._held: list[Any] = []
        self.kept_alive: list[Any] = []
        self.blanked = False
        """Whether numbers were left out."""

    def stand_in(self, value: Any) -> Any:
        """Return `value` without numbers; what is of no known form, and what leads to no numbers, as it is."""
        if value is None or isinstance(value, (bool, int, float, complex, np.generic, *_KEPT)):
            return self._made.get(id(value), value)
        if id(value) not in self._made:
            self._held.append(value)  # so that no identity is used twice
            self._made[id(value)] = value  # of what leads back to itself
            self._made[id(value)] = self._make(value)
        return self._made[id(value)]

    def _make(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray):
            return self._of_array(value)
        if isinstance(value, (array.array, bytearray, bytes)):
            self.blanked = self.blanked or len(value) > 0
            zeros = bytes(len(memoryview(value).cast("B")))
            return array.array(value.typecode, zeros) if isinstance(value, array.array) else type(value)(zeros)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return self._of_items(value)
        if isinstance(value, dict):
            return self._of_table(value)
        if isinstance(value, (partial, types.MethodType, types.FunctionType, weakref.ref, types.MappingProxyType)):
            return self._of_link(value)
        return self._of_object(value)

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        self.blanked = True
        dense = not_dense(tensor) is None
        bare = tensor.detach().to("meta") if dense else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(bare, tensor.requires_grad)
        return bare.requires_grad_() if tensor.is_leaf and tensor.requires_grad else bare

    def _of_array(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        made = np.zeros_like(value)
        if value.dtype.hasobject:
            for place in np.ndindex(value.shape):
                made[place] = self._of_item(value[place], False, False)
            return made
        self.blanked = self.blanked or (value.size > 0 and (value.dtype.char in _NUMBERS or bool(value.dtype.names)))
        if value.dtype.kind in "fc":
            made.fill(np.nan)
        elif value.dtype.kind == "i":
            made.fill(np.iinfo(value.dtype).min)
        return made if value.dtype.char in _NUMBERS or value.dtype.names else value

    def _of_items(self, value: Any) -> Any:
        items = list(value)
        few = len(items) < _FEW
        found = [self._of_item(one, few, few and isinstance(value, tuple)) for one in items]
        if all(map(operator.is_, items, found)):
            return value
        if isinstance(value, tuple):
            return tuple.__new__(type(value), found)
        made = copy.copy(value)
        if isinstance(made, frozenset):
            return frozenset(found)
        made.clear()
        (made.update if isinstance(made, set) else made.extend)(found)
        return made

    def _of_table(self, value: Any) -> Any:
        found = {key: self._of_item(one, len(value) < _FEW, False) for key, one in dict.items(value)}
        if all(map(operator.is_, dict.values(value), found.values())):
            return value
        made = copy.copy(value)
        for key, one in found.items():
            dict.__setitem__(made, key, one)
        return made

    def _of_item(self, value: Any, few: bool, setting: bool) -> Any:
        """Return the stand-in of an item of a container, with `few` others; `setting`: its numbers stay."""
        if not isinstance(value, (int, float, complex, np.generic)) or setting or isinstance(value, (bool, np.bool_)):
            return self.stand_in(value)
        if few and isinstance(value, (int, np.integer)):
            return value
        self.blanked = True
        return _blank(value)

    def _of_link(self, value: Any) -> Any:
        if isinstance(value, partial):
            before = (value.func, *value.args, *value.keywords.values())
            func, *given = map(self.stand_in, before)
            named = dict(zip(value.keywords, given[len(value.args) :], strict=True))
            same = all(map(operator.is_, before, (func, *given)))
            return value if same else type(value)(func, *given[: len(value.args)], **named)
        if isinstance(value, types.MethodType):
            owner, func = self.stand_in(value.__self__), self.stand_in(value.__func__)
            same = owner is value.__self__ and func is value.__func__
            return value if same else types.MethodType(func, owner)
        if isinstance(value, types.MappingProxyType):
            return types.MappingProxyType(self._of_table(dict(value)))
        if isinstance(value, weakref.ref):
            there = value()
            if (made := self.stand_in(there)) is there:
                return value
            self.kept_alive.append(made)
            return weakref.ref(made)
        return value if is_installed(value) else self._of_function(value)

    def _of_function(self, value: types.FunctionType) -> types.FunctionType:
        cells = tuple(self._of_cell(cell) for cell in value.__closure__ or ())
        defaults = tuple(map(self.stand_in, value.__defaults__ or ()))
        named = {name: self.stand_in(one) for name, one in (value.__kwdefaults__ or {}).items()}
        table = {name: self.stand_in(one) for name, one in vars(value).items()}
        before = (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        after = (*cells, *defaults, *named.values())
        if all(map(operator.is_, (*before, *vars(value).values()), (*after, *table.values()))):
            return value
        closure = cells if value.__closure__ else None
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, closure)
        made.__kwdefaults__, made.__dict__ = named, table
        return made

    def _of_cell(self, cell: types.CellType) -> types.CellType:
        try:
            held = cell.cell_contents
        except ValueError:
            return cell
        made = self.stand_in(held)
        return cell if made is held else types.CellType(made)

    def _of_object(self, value: Any) -> Any:
        kind = type(value)
        table, slots = attributes_of(value), slots_of(kind)
        if (
            not (table or slots)
            or hides_state(kind)
            or is_closed(kind.__module__)
            or callable(getattr(kind, "__next__", None))
        ):
            return value
        before = {**table, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
        try:
            made = object.__new__(kind)
        except TypeError:  # a class of Python's own, such as a namespace
            made = copy.copy(value)
        self._made[id(value)] = made
        for name, one in (found := {name: self.stand_in(one) for name, one in before.items()}).items():
            object.__setattr__(made, name, one)
        return value if all(found[name] is one for name, one in before.items()) else made


def _blank(number: Any) -> Any:
    """Return what stands for `number`: not a number, or of whole ones the least."""
    if isinstance(number, (float, np.floating)):
        return type(number)("nan")
    if isinstance(number, (complex, np.complexfloating)):
        return type(number)(complex("nan"))
    if isinstance(number, np.integer):
        return np.iinfo(number.dtype).min
    return _BLANK_INTEGER
